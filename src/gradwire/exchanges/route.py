"""Several exchanges in one bucket, by parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.exchanges.context import Context
from gradwire.layout import BucketLayout, Slot
from gradwire.ops import Family

if TYPE_CHECKING:
    from gradwire.exchanges import Exchange


@dataclass(frozen=True)
class Route:
    """Each parameter by the exchange of the first pattern that fits its name.

    The values of each exchange are copied together, exchanged as a bucket of their own, and copied back.
    """

    routes: tuple[tuple[str, Exchange], ...]

    @property
    def communicates(self) -> bool:
        return any(exchange.communicates for _, exchange in self.routes)

    @property
    def kernels(self) -> frozenset[Family]:
        return frozenset().union(*(exchange.kernels for _, exchange in self.routes))

    def check(self, names: Iterable[str]) -> None:
        """ValueError for a pattern that no parameter goes by, or a parameter without a pattern."""
        used = {self._choose(name) for name in names}
        for number, (pattern, _) in enumerate(self.routes):
            if number not in used:
                raise ValueError(
                    f"no parameter goes by the route {pattern!r}: check its spelling and its place"
                )

    def split(self, layout: BucketLayout) -> list[tuple[Exchange, BucketLayout, list[Slot]]]:
        """Each exchange with its part of a bucket, and where the part's parameters lie in the whole."""
        parts = []
        for number, (_, exchange) in enumerate(self.routes):
            own = [slot for slot in layout.slots if self._choose(slot.name) == number]
            if own:
                offsets = itertools.accumulate((slot.numel for slot in own), initial=0)
                slots = tuple(replace(slot, offset=o) for slot, o in zip(own, offsets, strict=False))
                # An index of its own: seeds of stochastic rounding must differ from part to part.
                index = layout.index * len(self.routes) + number
                parts.append((exchange, BucketLayout(index, layout.dtype, slots), own))
        return parts

    def run(self, flat: Tensor, context: Context) -> None:
        parts = self.split(context.layout)
        for number, (exchange, layout, places) in enumerate(parts):
            inner = replace(context, layout=layout)
            if len(parts) == 1:
                exchange.run(flat, inner)
                return
            size = layout.numel * flat.element_size()
            part = context.scratch.bytes(f"route{number}", size, flat.device).view(flat.dtype)
            pairs = [
                (
                    flat[place.offset : place.offset + place.numel],
                    part[slot.offset : slot.offset + slot.numel],
                )
                for place, slot in zip(places, layout.slots, strict=True)
            ]
            for whole, own in pairs:
                own.copy_(whole)
            exchange.run(part, inner)
            for whole, own in pairs:
                whole.copy_(own)

    def wire_bytes(self, numel: int, dtype: torch.dtype, rank: int, world_size: int) -> int:
        raise ValueError("what a route sends depends on the parameters, not on their number: see Wire.plan()")

    def _choose(self, name: str) -> int:
        for number, (pattern, _) in enumerate(self.routes):
            if fnmatchcase(name, pattern):
                return number
        raise ValueError(f"no route fits parameter {name!r}; end with one for '*'")
