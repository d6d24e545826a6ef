"""Protocols that average one bucket over a group, each in straight-line code."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gradwire.exchanges.context import Context
from gradwire.exchanges.hierarchical import Hierarchical
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

    def run(self, flat: Tensor, context: Context) -> None:
        """Replace ``flat`` by the sum over ranks of ``flat * scale``, the same bits on every rank."""
        ...

    def wire_bytes(self, numel: int, dtype: torch.dtype, rank: int, world_size: int) -> int:
        """The exact number of bytes this rank sends for a bucket."""
        ...
