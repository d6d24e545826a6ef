"""Protocols that average one bucket over a group, each in straight-line code."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges.context import Context
from gradwire.exchanges.hierarchical import Hierarchical
from gradwire.exchanges.links import Links
from gradwire.exchanges.low_rank import LowRank
from gradwire.exchanges.noop import Noop
from gradwire.exchanges.plain import PLAIN
from gradwire.exchanges.rounds import Rounds, rounds_of, shared_bytes, sum_rounds
from gradwire.exchanges.route import Route
from gradwire.exchanges.schedule import Schedule
from gradwire.exchanges.scratch import Scratch
from gradwire.exchanges.selector import Selector
from gradwire.exchanges.sparse import average_sparse
from gradwire.exchanges.two_shot import TwoShot
from gradwire.ops import Family

__all__ = [
    "PLAIN",
    "Context",
    "Exchange",
    "Hierarchical",
    "Links",
    "LowRank",
    "Noop",
    "Rounds",
    "Route",
    "Schedule",
    "Scratch",
    "Selector",
    "TwoShot",
    "average_sparse",
    "rounds_of",
    "shared_bytes",
    "sum_rounds",
]


class Exchange(Protocol):
    """A way to average one bucket. A value: what it remembers from step to step lives elsewhere."""

    @property
    def communicates(self) -> bool:
        """Whether `run` needs its group at all."""
        ...

    @property
    def kernels(self) -> frozenset[Family]:
        """What it computes with, to be compiled before the first backward pass."""
        ...

    @property
    def sees_parameters(self) -> bool:
        """Whether what it sends depends on a bucket's parameters, and not on the number of values alone."""
        ...

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each of its stages, in order, if it does not send the same in every step."""
        ...

    def run(self, flat: Tensor, context: Context) -> None:
        """Replace ``flat`` by the sum over ranks of ``flat * scale``, the same bits on every rank."""
        ...

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        """The exact bytes that each rank sends for a bucket in a step, but for votes on what is not used."""
        ...

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        """How many messages, one after the other, a rank sends at most to each that it sends any to."""
        ...
