"""Several exchanges in one bucket, by parameter."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from gradwire.buckets import BucketLayout, Slot
from gradwire.exchanges.context import Context
from gradwire.exchanges.exchange import Exchange, repeats_as_all, shared_bytes_of
from gradwire.exchanges.links import Links, add_up
from gradwire.exchanges.rounds import Rounds
from gradwire.exchanges.selector import Selector
from gradwire.ops import Family, cached_on_owner
from gradwire.torch_private import copy_all_

Run = tuple[int, int]
"""The start and end, in a bucket, of values that lie one behind the other."""

Part = tuple[Exchange, BucketLayout, tuple[Run, ...]]
"""An exchange, the layout of its part of a bucket, and the runs of the bucket that it consists of."""


@dataclass(frozen=True)
class Route:
    """Average each parameter by the exchange of the first selector that fits it.

    The parameters of each exchange are copied into a bucket of their own, averaged, and copied back. If they
    lie together, they are averaged where they are.
    """

    routes: tuple[tuple[Selector, Exchange], ...]

    sees_parameters = True

    @property
    def communicates(self) -> bool:
        return any(exchange.communicates for _, exchange in self.routes)

    @property
    def kernels(self) -> frozenset[Family]:
        return frozenset().union(*(exchange.kernels for _, exchange in self.routes))

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(sorted({start for _, exchange in self.routes for start in exchange.starts}))

    def check(self, slots: Iterable[Slot]) -> None:
        """Raise ValueError for a route without a parameter, or a parameter without a route."""
        used = {self.choose(slot) for slot in slots}
        for number, (selector, _) in enumerate(self.routes):
            if number not in used:
                raise ValueError(
                    f"no parameter goes by the route {str(selector)!r}; check its spelling, and that no "
                    "earlier route takes its parameters"
                )

    def split(self, layout: BucketLayout) -> tuple[Part, ...]:
        """Return the parts of a bucket, one per exchange that has parameters in it."""
        return _split(layout, self)

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        for number, (exchange, layout, runs) in enumerate(self.split(context.layout)):
            if not runs:
                continue  # all its parameters are empty
            inner, num_shards = replace(context, layout=layout), layout.num_shards
            if len(runs) == 1 and (num_shards == 1 or layout.numel == flat.numel()):
                ((begin, end),) = runs
                yield from exchange.rounds(flat[begin:end], inner)
                continue
            size = layout.numel * flat.element_size()
            part = context.scratch.bytes(f"route{number}", size, flat.device).view(flat.dtype)
            rows = flat.view(num_shards, -1)
            there = [rows[:, begin // num_shards : end // num_shards] for begin, end in runs]
            here = list(part.view(num_shards, -1).split([each.shape[1] for each in there], dim=1))
            copy_all_(here, there)
            yield from exchange.rounds(part, inner)
            copy_all_(there, here)

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        return shared_bytes_of([(exchange, part) for exchange, part, _ in self.split(layout)], step)

    def repeats_as(self, step: int) -> Hashable | None:
        return repeats_as_all((exchange for _, exchange in self.routes), step)

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        parts = [exchange.link_bytes(part, world_size, step) for exchange, part, _ in self.split(layout)]
        return [add_up(sent) for sent in zip(*parts, strict=True)]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        return add_up(
            exchange.link_rounds(part, world_size, step) for exchange, part, _ in self.split(layout)
        )

    def choose(self, slot: Slot) -> int:
        """Return the number of a parameter's route; ValueError if none fits."""
        for number, (selector, _) in enumerate(self.routes):
            if selector.fits(slot):
                return number
        shape = tuple(slot.parameter_shape)
        raise ValueError(f"no route fits parameter {slot.name!r} of shape {shape}; end with a route for '*'")


# Cached: matching the patterns in every step would take longer than a small exchange.
@cached_on_owner
def _split(layout: BucketLayout, route: Route) -> tuple[Part, ...]:
    parts = []
    for number, (_, exchange) in enumerate(route.routes):
        own = tuple(slot for slot in layout.slots if route.choose(slot) == number)
        if own:
            # Each part has its own index, since seeds of stochastic rounding must differ between parts.
            index = layout.index * len(route.routes) + number
            part = BucketLayout.packed(index, layout.dtype, own, layout.num_shards)
            parts.append((exchange, part, tuple(_runs(own))))
    return tuple(parts)


def _runs(slots: Iterable[Slot]) -> Iterator[Run]:
    """Yield the runs of a bucket that these parameters fill."""
    begin = end = 0
    for slot in slots:
        if slot.offset != end:
            if end > begin:
                yield begin, end
            begin = slot.offset
        end = slot.offset + slot.numel
    if end > begin:
        yield begin, end
