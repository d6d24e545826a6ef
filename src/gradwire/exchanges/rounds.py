"""Rounds of sums over ranks, taken for one exchange or for several side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from gradwire.exchanges.context import Context
from gradwire.exchanges.one_shot import sum_values
from gradwire.exchanges.two_phase import Sum, TwoPhaseReduce

Round = tuple[Sum, ...]
"""Sums that one exchange asks for at once."""

Rounds = Generator[Round, None, None]


def run_rounds(rounds: Iterable[Rounds], context: Context) -> None:
    """Run exchanges to their ends, side by side; sums that they ask for at once share messages.

    Group, scratch memory and scale are those of ``context``.
    """
    running = list(rounds)
    try:
        while running:
            asked = [(each, round_) for each in running if (round_ := next(each, None)) is not None]
            running = [each for each, _ in asked]
            _take([each for _, round_ in asked for each in round_ if each.values.numel()], context)
    finally:
        for each in running:
            each.close()  # so that it puts back what it holds


def _take(sums: list[Sum], context: Context) -> None:
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
    """Sum parts in one message, copied together: a backend that adds them up itself takes one tensor."""
    if len(parts) == 1:
        sum_values(parts[0], context)
        return
    num_bytes = sum(part.numel() * part.element_size() for part in parts)
    together = context.scratch.bytes("together", num_bytes, parts[0].device).view(parts[0].dtype)
    places = list(together.split([part.numel() for part in parts]))
    torch._foreach_copy_(places, parts)
    sum_values(together, context)
    torch._foreach_copy_(parts, places)
