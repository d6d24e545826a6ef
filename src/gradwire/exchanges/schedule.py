"""One exchange after another, by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges.context import Context
from gradwire.exchanges.links import Links
from gradwire.exchanges.rounds import Rounds, rounds_of, shared_bytes, sum_rounds
from gradwire.ops import Family

if TYPE_CHECKING:
    from gradwire.exchanges import Exchange


@dataclass(frozen=True)
class Schedule:
    """Each stage from its step on; steps are counted over the whole run, also when it is resumed."""

    stages: tuple[tuple[int, Exchange], ...]
    """First steps, ascending from 0, each with its exchange."""

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

    def run(self, flat: Tensor, context: Context) -> None:
        sum_rounds([self.rounds(flat, context)], context)

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        """`run`, but for the sums over ranks that the stage leaves to others."""
        yield from rounds_of(self.at(context.step), flat, context)

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        """How much a bucket has in the messages of `rounds`."""
        return shared_bytes(self.at(step), layout, step)

    def at(self, step: int) -> Exchange:
        """The exchange of a step."""
        return next(each for start, each in reversed(self.stages) if start <= step)

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        return self.at(step).link_bytes(layout, world_size, step)

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        return self.at(step).link_rounds(layout, world_size, step)
