"""Exchanges that follow one another, by step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges.context import Context
from gradwire.exchanges.exchange import Exchange
from gradwire.exchanges.links import Links
from gradwire.exchanges.rounds import Rounds
from gradwire.ops import Family


@dataclass(frozen=True)
class Schedule:
    """Average by each stage from its first step on; a resumed run goes on counting steps."""

    stages: tuple[tuple[int, Exchange], ...]
    """Pairs of a first step and an exchange; first steps ascend from 0."""

    @property
    def communicates(self) -> bool:
        return any(exchange.communicates for _, exchange in self.stages)

    @property
    def kernels(self) -> frozenset[Family]:
        return frozenset().union(*(exchange.kernels for _, exchange in self.stages))

    @property
    def sees_parameters(self) -> bool:
        return any(exchange.sees_parameters for _, exchange in self.stages)

    @property
    def starts(self) -> tuple[int, ...]:
        inner = {start for _, exchange in self.stages for start in exchange.starts}
        return tuple(sorted(inner.union(start for start, _ in self.stages)))

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        yield from self.at(context.step).rounds(flat, context)

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        return self.at(step).shared_bytes(layout, step)

    def repeats_as(self, step: int) -> Hashable | None:
        start, exchange = self._stage(step)
        key = exchange.repeats_as(step)
        return None if key is None else (start, key)

    def at(self, step: int) -> Exchange:
        """Return the exchange of a step."""
        return self._stage(step)[1]

    def _stage(self, step: int) -> tuple[int, Exchange]:
        return next(stage for stage in reversed(self.stages) if stage[0] <= step)

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        return self.at(step).link_bytes(layout, world_size, step)

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        return self.at(step).link_rounds(layout, world_size, step)
