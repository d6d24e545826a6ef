"""Exchanges whose sums over ranks may share a message with those of other buckets."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges.context import Context
from gradwire.exchanges.one_shot import sum_values
from gradwire.exchanges.two_phase import Sum, TwoPhaseReduce

if TYPE_CHECKING:
    from gradwire.exchanges import Exchange


Round = tuple[Sum, ...]
"""Sums that one exchange asks for at once."""

Rounds = Generator[Round, None, None]


@runtime_checkable
class Sharing(Protocol):
    """An exchange that leaves it to others to sum its messages."""

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        """Average, but for the sums: those of a round have been taken when this goes on."""
        ...

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        """How large a bucket is in such messages, the same on every rank; 0 if there are none."""
        ...


def rounds_of(exchange: Exchange, flat: Tensor, context: Context) -> Rounds:
    """The rounds of any exchange that others may sum; one that shares none runs, and yields nothing."""
    if isinstance(exchange, Sharing):
        yield from exchange.rounds(flat, context)
    else:
        exchange.run(flat, context)


def shared_bytes(exchange: Exchange, layout: BucketLayout, step: int) -> int:
    """How many bytes of a bucket any exchange leaves to others to sum."""
    return exchange.shared_bytes(layout, step) if isinstance(exchange, Sharing) else 0


def sum_rounds(rounds: Iterable[Rounds], context: Context) -> None:
    """Run several exchanges to their ends, side by side; what they ask for at once shares its messages."""
    running = list(rounds)
    try:
        _sum_side_by_side(running, context)
    finally:
        for each in running:
            each.close()  # what it holds, it puts back


def _sum_side_by_side(running: list[Rounds], context: Context) -> None:
    while running:
        asked = [(each, round_) for each in running if (round_ := next(each, None)) is not None]
        running = [each for each, _ in asked]
        sums = [each for _, round_ in asked for each in round_ if each.values.numel()]
        encoded = [each for each in sums if each.codec is not None]
        if encoded:
            TwoPhaseReduce(encoded, context).run()
        exact: dict[torch.dtype, list[Tensor]] = {}
        for each in sums:
            if each.codec is None:
                exact.setdefault(each.values.dtype, []).append(each.values)
        for values in exact.values():
            _sum_exactly(values, context)


def _sum_exactly(parts: list[Tensor], context: Context) -> None:
    """One after the other, in one message: a backend that adds them up itself takes one tensor."""
    if len(parts) == 1:
        sum_values(parts[0], context)
        return
    num_bytes = sum(part.numel() * part.element_size() for part in parts)
    joint = context.scratch.bytes("joint", num_bytes, parts[0].device).view(parts[0].dtype)
    places = list(joint.split([part.numel() for part in parts]))
    torch._foreach_copy_(places, parts)
    sum_values(joint, context)
    torch._foreach_copy_(parts, places)
