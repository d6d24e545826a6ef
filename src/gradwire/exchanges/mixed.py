"""Several exchanges in one bucket, by parameter, without a copy."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from gradwire.buckets import BucketLayout, Slot
from gradwire.codecs import Codec
from gradwire.exchanges.context import Context
from gradwire.exchanges.exchange import Exchange, repeats_as_all, shared_bytes_of
from gradwire.exchanges.links import Links, add_up
from gradwire.exchanges.one_shot import average_bytes, num_rounds
from gradwire.exchanges.rounds import Rounds, side_by_side
from gradwire.exchanges.two_shot import TwoShot
from gradwire.ops import Family, cached_on_owner

# More runs than a bucket has: each run of each bucket needs an index of its own, for its seeds.
_NUM_INDICES = 1 << 16

Run = tuple[Exchange, BucketLayout, int]
"""An exchange, the layout of its part of a bucket, and the place in the bucket where that part begins."""


@dataclass(frozen=True)
class Mixed:
    """Average each parameter by the exchange that is assigned to its name.

    Neighbours in a bucket that have the same exchange are averaged together, as a *run*. A run is a view of
    the bucket, and all runs of a bucket share their messages. So a bucket costs no copy and no further
    round, unlike in a `Route`, whose parameters may lie anywhere.

    A bucket of shards holds parts of each parameter, rank by rank. It is one run: all of it goes by the first
    of the exchanges that any of its parameters has.
    """

    assigned: tuple[tuple[Exchange, tuple[str, ...]], ...]
    other: Exchange
    """The exchange of parameters that are not named."""
    apart: tuple[str, ...] = ()
    """Parameters that begin a run, whatever is before them: an encoding's block would hold values of both."""

    sees_parameters = True
    communicates = True
    starts = (0,)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return *(exchange for exchange, _ in self.assigned), self.other

    @property
    def kernels(self) -> frozenset[Family]:
        return frozenset().union(*(exchange.kernels for exchange in self.exchanges))

    def split(self, layout: BucketLayout) -> tuple[Run, ...]:
        """Return the runs of a bucket, in order."""
        return _split(layout, self)

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        runs = self.split(context.layout)
        if len(runs) == 1:
            ((exchange, layout, _),) = runs
            yield from exchange.rounds(flat, replace(context, layout=layout))
            return
        yield from side_by_side(
            exchange.rounds(
                flat[begin : begin + layout.numel],
                replace(context, layout=layout, scratch=context.scratch.part(number)),
            )
            for number, (exchange, layout, begin) in enumerate(runs)
        )

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        return shared_bytes_of([(exchange, run) for exchange, run, _ in self.split(layout)], step)

    def repeats_as(self, step: int) -> Hashable | None:
        return repeats_as_all(self.exchanges, step)

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        together = [Links(0, sent) for sent in average_bytes(self._together(layout), world_size)]
        apart = [e.link_bytes(run, world_size, step) for e, run in self._apart(layout)]
        return [add_up(sent) for sent in zip(together, *apart, strict=True)]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        codecs = [codec for codec, _ in self._together(layout)]
        apart = [e.link_rounds(run, world_size, step) for e, run in self._apart(layout)]
        return add_up([Links(0, num_rounds(codecs, world_size)), *apart])

    def _together(self, layout: BucketLayout) -> list[tuple[Codec, int]]:
        """Return the codec and the number of values of each run that takes a single sum."""
        sums = [
            (exchange.codec, *run.real_values)
            for exchange, run, _ in self.split(layout)
            if isinstance(exchange, TwoShot)
        ]
        return [(codec.resolve(dtype), numel) for codec, numel, dtype in sums if numel]

    def _apart(self, layout: BucketLayout) -> list[tuple[Exchange, BucketLayout]]:
        """Return the runs that take other sums."""
        return [(e, run) for e, run, _ in self.split(layout) if not isinstance(e, TwoShot)]


@cached_on_owner
def _split(layout: BucketLayout, mixed: Mixed) -> tuple[Run, ...]:
    by_name = {name: exchange for exchange, names in mixed.assigned for name in names}
    if layout.num_shards > 1:
        chosen = {by_name.get(slot.name, mixed.other) for slot in layout.slots}
        exchange = next(each for each in mixed.exchanges if each in chosen)
        return ((exchange, replace(layout, index=layout.index * _NUM_INDICES), 0),)
    runs: list[Run] = []
    assigned = ((by_name.get(slot.name, mixed.other), slot) for slot in layout.slots)
    for exchange, slots in _neighbours(assigned, frozenset(mixed.apart)):
        index = layout.index * _NUM_INDICES + len(runs)
        runs.append((exchange, BucketLayout.packed(index, layout.dtype, slots), slots[0].offset))
    return tuple(runs)


def _neighbours(
    assigned: Iterable[tuple[Exchange, Slot]], apart: Collection[str]
) -> Iterator[tuple[Exchange, list[Slot]]]:
    """Yield each exchange with the neighbours that have it; a parameter of ``apart`` begins anew."""
    now: Exchange | None = None
    slots: list[Slot] = []
    for exchange, slot in assigned:
        if now is not None and (exchange != now or slot.name in apart):
            yield now, slots
            slots = []
        now = exchange
        slots.append(slot)
    if now is not None:
        yield now, slots
