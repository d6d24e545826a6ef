"""Exchanges whose sums over ranks may share a message with those of other buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.exchanges.context import Context
from gradwire.exchanges.one_shot import sum_values
from gradwire.exchanges.two_shot import TwoShot
from gradwire.layout import BucketLayout

if TYPE_CHECKING:
    from gradwire.exchanges import Exchange


@dataclass(frozen=True)
class Sum:
    """Values that are to become the sum over ranks of ``values * scale``: exactly, or as a codec has them."""

    values: Tensor
    codec: Codec | None = None
    left_out: Tensor | None = None
    """Is to become what the codec has left out of this rank's values."""


Round = tuple[Sum, ...]
"""Sums that one exchange asks for at once."""


@runtime_checkable
class Sharing(Protocol):
    """An exchange that leaves it to others to sum its messages."""

    def rounds(self, flat: Tensor, context: Context) -> Iterator[Round]:
        """Average, but for the sums: those of a round have been taken when this goes on."""
        ...

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        """How much a bucket has in such messages, in all; 0 if there are none."""
        ...


def rounds_of(exchange: Exchange, flat: Tensor, context: Context) -> Iterator[Round]:
    """The rounds of any exchange that others may sum; one that shares none runs, and yields nothing."""
    if isinstance(exchange, Sharing):
        yield from exchange.rounds(flat, context)
    else:
        exchange.run(flat, context)


def shared_bytes(exchange: Exchange, layout: BucketLayout, step: int) -> int:
    """How many bytes of a bucket any exchange leaves to others to sum."""
    return exchange.shared_bytes(layout, step) if isinstance(exchange, Sharing) else 0


def sum_rounds(rounds: Iterable[Iterator[Round]], context: Context) -> None:
    """Run several exchanges to their ends, side by side; what they ask for at once shares its messages."""
    running = list(rounds)
    while running:
        asked = [(each, sums) for each in running if (sums := next(each, None)) is not None]
        running = [each for each, _ in asked]
        alike: dict[tuple[torch.dtype, Codec | None, bool], list[Sum]] = {}
        for each in (each for _, sums in asked for each in sums if each.values.numel()):
            alike.setdefault((each.values.dtype, each.codec, each.left_out is None), []).append(each)
        for same in alike.values():
            _take(same, context)


def _take(sums: list[Sum], context: Context) -> None:
    codec, values = sums[0].codec, [each.values for each in sums]
    joint = _joint("joint", values, context)
    if len(sums) > 1:
        torch._foreach_copy_(_split(joint, values), values)
    left_out = [each.left_out for each in sums if each.left_out is not None]
    residual = _joint("left out", left_out, context).zero_() if left_out else None
    if codec is None:
        sum_values(joint, context)
    else:
        TwoShot(codec).average(joint, residual, context)
    if len(sums) > 1:
        torch._foreach_copy_(values, _split(joint, values))
        if residual is not None:
            torch._foreach_copy_(left_out, _split(residual, left_out))


def _joint(name: str, parts: list[Tensor], context: Context) -> Tensor:
    """Room for all parts, one after the other; a single one is its own."""
    if len(parts) == 1:
        return parts[0]
    num_bytes = sum(part.numel() * part.element_size() for part in parts)
    return context.scratch.bytes(name, num_bytes, parts[0].device).view(parts[0].dtype)


def _split(joint: Tensor, parts: list[Tensor]) -> list[Tensor]:
    return list(joint.split([part.numel() for part in parts]))
