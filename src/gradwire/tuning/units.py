"""Units: neighbouring parameters of a bucket, or a bucket of shards, that get their encoding together."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gradwire.buckets import BucketLayout, Slot

SMALLEST = 1 << 14
"""Values of a unit, at least, if its bucket has as many beside tables."""
# A run of its own costs a bucket some tens of microseconds, so a unit is not smaller than this share of its
# bucket, either.
_SMALLEST_SHARE = 1 / 16


@dataclass(frozen=True)
class TuningUnit:
    """Neighbouring parameters of one bucket, or all parameters of a bucket of shards."""

    bucket: int
    begin: int
    """Place of the first value in the bucket, counted in real values."""
    numel: int
    """Number of real values."""
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of real values of each parameter in a chunk."""
    num_chunks: int = 1
    """The number of chunks of a bucket of shards, each with a part of every parameter; otherwise 1."""

    @property
    def is_scattered(self) -> bool:
        """True if each rank gets the sum of one chunk alone."""
        return self.num_chunks > 1

    @property
    def chunk_numel(self) -> int:
        return self.numel // self.num_chunks


def units_of(layouts: Iterable[BucketLayout], tables: Collection[str] = ()) -> tuple[TuningUnit, ...]:
    """Return the units of a model's buckets, in order; every parameter with values is in one of them.

    A parameter of ``tables`` shares a unit only with others of them. A bucket of shards is one unit, since
    each chunk of it holds a part of every parameter.
    """
    units = []
    for layout in layouts:
        least = max(SMALLEST, layout.numel * _SMALLEST_SHARE)
        pairs = layout.real_values[0] // max(1, layout.numel)  # 2 for complex values
        if layout.num_shards > 1 and layout.numel:
            names = tuple(slot.name for slot in layout.slots)
            sizes = tuple(pairs * slot.numel // layout.num_shards for slot in layout.slots)
            units.append(TuningUnit(layout.index, 0, pairs * layout.numel, names, sizes, layout.num_shards))
            continue
        for slots in _group([slot for slot in layout.slots if slot.numel], least, tables):
            sizes = tuple(pairs * slot.numel for slot in slots)
            names = tuple(slot.name for slot in slots)
            units.append(TuningUnit(layout.index, pairs * slots[0].offset, sum(sizes), names, sizes))
    return tuple(units)


def _group(slots: list[Slot], least: float, tables: Collection[str]) -> list[list[Slot]]:
    """Divide parameters into neighbours of at least ``least`` values; a rest joins those before it."""
    groups: list[list[Slot]] = []
    for slot in slots:
        if groups and _numel(groups[-1]) < least and _are_alike(groups[-1][0], slot, tables):
            groups[-1].append(slot)
        else:
            groups.append([slot])
    if len(groups) > 1 and _numel(groups[-1]) < least and _are_alike(groups[-2][0], groups[-1][0], tables):
        rest = groups.pop()
        groups[-1] += rest
    return groups


def _numel(slots: list[Slot]) -> int:
    return sum(slot.numel for slot in slots)


def _are_alike(one: Slot, other: Slot, tables: Collection[str]) -> bool:
    return (one.name in tables) == (other.name in tables)
