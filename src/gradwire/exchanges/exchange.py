"""The protocol of an exchange, and a function that averages one bucket by it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges.context import Context
from gradwire.exchanges.links import Links
from gradwire.exchanges.rounds import Rounds, run_rounds
from gradwire.exchanges.sparse import average_sparse
from gradwire.ops import Family


class Exchange(Protocol):
    """A way to average one bucket.

    An exchange is a frozen value. Its state from step to step lives in the context's memory.
    """

    @property
    def communicates(self) -> bool:
        """True if it exchanges messages with other ranks."""
        ...

    @property
    def kernels(self) -> frozenset[Family]:
        """The kernels to compile before the first backward pass."""
        ...

    @property
    def sees_parameters(self) -> bool:
        """True if its messages depend on a bucket's parameters, not only on its number of values."""
        ...

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each stage, in order; ``(0,)`` if every step sends the same bytes."""
        ...

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        """Replace ``flat`` by the sum over ranks of ``flat * scale``, the same bits on every rank.

        A generator: it yields the sums over ranks that it needs, and goes on when they have been taken.
        """
        ...

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        """Return the bytes of a bucket in messages that other buckets can share; 0 if there are none."""
        ...

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        """Return the exact bytes that each rank sends for a bucket, votes on unused parameters excepted."""
        ...

    def repeats_as(self, step: int) -> Hashable | None:
        """Return a key that is the same for steps of the same work on a device; None if no two are the same.

        Work is the same if it differs in nothing but the values in memory, and the step where kernels read
        it from `Context.step_on_device`.
        """
        ...

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        """Return the largest number of messages that one rank sends to one peer, one after the other."""
        ...


def average(flat: Tensor, exchange: Exchange, context: Context) -> Tensor:
    """Average one bucket and return the result: ``flat`` itself if dense, a new tensor if sparse."""
    if flat.is_sparse:
        return average_sparse(flat, context.group, context.scale)
    run_rounds([exchange.rounds(flat, context)], context)
    return flat


def shared_bytes_of(parts: Sequence[tuple[Exchange, BucketLayout]], step: int) -> int:
    """Return `Exchange.shared_bytes` of a bucket whose parts have exchanges of their own.

    A bucket waits as a whole. So if one part can share messages, the bytes of all parts count.
    """
    shared = [exchange.shared_bytes(part, step) for exchange, part in parts]
    if not any(shared):
        return 0
    whole = [part.numel * part.dtype.itemsize for _, part in parts]
    return sum(own or all_of_it for own, all_of_it in zip(shared, whole, strict=True))


def repeats_as_all(exchanges: Iterable[Exchange], step: int) -> Hashable | None:
    """Return `Exchange.repeats_as` of several exchanges in one bucket."""
    keys = tuple(exchange.repeats_as(step) for exchange in exchanges)
    return None if None in keys else keys
