"""The exchange that sends nothing."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges.context import Context
from gradwire.exchanges.links import Links
from gradwire.exchanges.rounds import Rounds
from gradwire.ops import Family


@dataclass(frozen=True)
class Noop:
    """Leave every rank its own gradients, to measure a step without communication."""

    communicates = False
    sees_parameters = False
    starts = (0,)
    kernels: ClassVar[frozenset[Family]] = frozenset()

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        yield from ()

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        return 0

    def repeats_as(self, step: int) -> Hashable | None:
        return None

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        return [Links(0, 0)] * world_size

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        return Links(0, 0)
