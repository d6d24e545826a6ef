"""Exchanges whose sums over ranks may share a message with those of other buckets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradwire.exchanges.context import Context
from gradwire.exchanges.one_shot import sum_values
from gradwire.layout import BucketLayout

if TYPE_CHECKING:
    from gradwire.exchanges import Exchange


@runtime_checkable
class Sharing(Protocol):
    """An exchange that leaves it to others to sum its messages."""

    def rounds(self, flat: Tensor, context: Context) -> Iterator[Tensor]:
        """Average, but for the sums: each message has become its sum over ranks when this goes on."""
        ...

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        """How much a bucket has in such messages, in all; 0 if there are none."""
        ...


def rounds_of(exchange: Exchange, flat: Tensor, context: Context) -> Iterator[Tensor]:
    """The messages of any exchange that others may sum; one that shares none runs, and yields nothing."""
    if isinstance(exchange, Sharing):
        yield from exchange.rounds(flat, context)
    else:
        exchange.run(flat, context)


def shared_bytes(exchange: Exchange, layout: BucketLayout, step: int) -> int:
    """How many bytes of a bucket any exchange leaves to others to sum."""
    return exchange.shared_bytes(layout, step) if isinstance(exchange, Sharing) else 0


def sum_rounds(rounds: Iterable[Iterator[Tensor]], context: Context) -> None:
    """Run several exchanges to their ends, side by side, and sum what they ask for in one message a round."""
    running = list(rounds)
    while running:
        asked = [(each, message) for each in running if (message := next(each, None)) is not None]
        running = [each for each, _ in asked]
        by_dtype = sorted((message for _, message in asked), key=lambda message: str(message.dtype))
        for _, same in itertools.groupby(by_dtype, key=lambda message: message.dtype):
            _sum(list(same), context)


def _sum(messages: list[Tensor], context: Context) -> None:
    if len(messages) == 1:
        sum_values(messages[0], context)
        return
    sizes = [message.numel() for message in messages]
    dtype, device = messages[0].dtype, messages[0].device
    joint = context.scratch.bytes("joint", sum(sizes) * dtype.itemsize, device).view(dtype)
    parts = list(joint.split(sizes))
    torch._foreach_copy_(parts, messages)
    sum_values(joint, context)
    torch._foreach_copy_(messages, parts)
