"""Choices of an encoding for each parameter, and what they send and leave out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.buckets import BucketLayout
from gradwire.codecs import Codec
from gradwire.exchanges import Exchange, Hierarchical, Scattered, TwoShot
from gradwire.recipes import Tuning
from gradwire.tuning.allocation import allocate
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.units import SMALLEST, TuningUnit, units_of

# A sample is off by a few percent, and so is one step from the next.
_MARGIN = 0.95
# Units share no block if the error of one could grow by this part, as a square.
_SPILLED = 0.1
_NUM_ATTEMPTS = 8


@dataclass(frozen=True)
class EncodingChoice:
    """An encoding for each parameter."""

    encodings: Mapping[str, str]
    """Encodings by parameter."""
    num_bytes: int
    """Bytes that the busiest rank sends to other nodes in a step."""
    error: float | None
    """The error that a budget bounds; None if it is not known."""


class Chooser:
    """Makes choices for the buckets of a model, and knows their bytes."""

    def __init__(self, layouts: Sequence[BucketLayout], tuning: Tuning, world_size: int) -> None:
        self.units: tuple[TuningUnit, ...] = units_of(layouts, tuning.tables)
        self.layouts = tuple(layouts)
        self._layout_of = {layout.index: layout for layout in layouts}
        self._tuning = tuning
        self._world_size = world_size
        # Samples are fp32, whatever the buckets are.
        self.codecs: list[Codec] = [
            codec_of(exchange).resolve(torch.float32) for _, exchange in tuning.encodings
        ]

    @property
    def num_encodings(self) -> int:
        return len(self._tuning.encodings)

    @functools.cached_property
    def bytes_by_unit(self) -> list[list[int]]:
        """For each unit, the bytes that the busiest rank sends for it alone, by each encoding.

        A coarser encoding may send more: it has larger blocks, and each rank's part of a unit is filled up
        to whole ones.
        """
        parts = [_part(self._layout_of[unit.bucket], unit) for unit in self.units]
        exchanges = [exchange for _, exchange in self._tuning.encodings]
        return [[max(self._sent(part, exchange)) for exchange in exchanges] for part in parts]

    def best(self, table: ErrorTable, num_allowed: int) -> EncodingChoice:
        """Return the best choice from the ``num_allowed`` finest encodings."""
        allowed = [self._num_allowed(unit, num_allowed) for unit in self.units]
        num_bytes = [row[:n] for row, n in zip(self.bytes_by_unit, allowed, strict=True)]
        errors = [row[:n] for row, n in zip(self._relative(table), allowed, strict=True)]
        if (limit := self._tuning.max_bytes) is None:
            max_error = (_MARGIN * self._tuning.budget) ** 2
            numbers = allocate(num_bytes, errors, max_error=max_error)
            return self._choice(self._finer_for_free(numbers, errors, table), table)
        # Units that share messages send a few bytes more or less than each alone.
        target = limit
        for _ in range(_NUM_ATTEMPTS):
            numbers = allocate(num_bytes, errors, max_bytes=target)
            choice = self._choice(self._finer_for_free(numbers, errors, table), table)
            if choice.num_bytes <= limit:
                break
            target -= choice.num_bytes - limit
        return choice

    def reassess(self, choice: EncodingChoice | None, table: ErrorTable | None) -> EncodingChoice:
        """Return the same choice with the error that it has by now; None stands for the first encoding."""
        encodings: Mapping[str, str] = {} if choice is None else choice.encodings
        number: dict[str, int] = {name: index for index, name in enumerate(self._tuning.names)}
        # A parameter that is new, or whose encoding is not allowed any more, goes by the first. If a unit's
        # parameters had others, which they may in other buckets, it goes by the finest.
        first = self._tuning.first
        numbers = [
            min(number.get(encodings.get(name, ""), first) for name in unit.names) for unit in self.units
        ]
        return self._choice(numbers, table)

    def apart(self, table: ErrorTable | None) -> tuple[str, ...]:
        """Return the first parameters of units that must share no block with the unit before them.

        A block with values of two units spreads its error over both. That is much for the one whose values
        are small, and no sample shows it.
        """
        if table is None:
            return ()
        block = max(getattr(codec, "block", 1) for codec in self.codecs)
        errors = [row[-1] for row in table.errors]  # of the coarsest encoding
        found = []
        for (unit, own), (after, other) in itertools.pairwise(zip(self.units, errors, strict=True)):
            a_value, of_after = own / unit.numel, other / after.numel
            # At worst either has half of a block, and gets half of the error of the other half.
            spilled = block / 4 * abs(a_value - of_after)
            is_much = spilled > _SPILLED * (own if a_value < of_after else other)
            if is_much and unit.bucket == after.bucket:
                found.append(after.names[0])
        return tuple(found)

    def _relative(self, table: ErrorTable) -> list[list[float]]:
        return table.relative([unit.numel for unit in self.units])

    def _num_allowed(self, unit: TuningUnit, num_allowed: int) -> int:
        return min(num_allowed, *(self._tuning.num_allowed(name) for name in unit.names))

    def _choice(self, numbers: Sequence[int], table: ErrorTable | None) -> EncodingChoice:
        names = self._tuning.names
        encodings = {
            name: names[number]
            for unit, number in zip(self.units, numbers, strict=True)
            for name in unit.names
        }
        exchange = self._tuning.exchange(encodings, self.apart(table))
        sent = [self._sent(layout, exchange) for layout in self.layouts]
        error = None
        if table is not None and any(table.norms):
            left_out = (row[n] for row, n in zip(self._relative(table), numbers, strict=True))
            error = math.sqrt(math.fsum(left_out))
        return EncodingChoice(encodings, _of_busiest(sent), error)

    def _finer_for_free(
        self, numbers: Sequence[int], errors: Sequence[Sequence[float]], table: ErrorTable
    ) -> list[int]:
        """Return finer encodings of small units with which no more bytes are sent.

        Messages are filled up to 64 bytes, and neighbours with the same encoding share a block.
        """
        found = list(numbers)
        small = [number for number, unit in enumerate(self.units) if unit.numel < SMALLEST]
        if not small:
            return found
        apart = self.apart(table)
        sent = {layout.index: self._sent_with(layout, found, apart) for layout in self.layouts}

        def refine(number: int) -> bool:
            """Change a unit to the finest encoding that costs nothing; return False if it has that one."""
            index, row = self.units[number].bucket, errors[number]
            for finer in range(found[number]):
                if row[finer] < row[found[number]]:
                    tried = [*found[:number], finer, *found[number + 1 :]]
                    then = {**sent, index: self._sent_with(self._layout_of[index], tried, apart)}
                    if _of_busiest(then.values()) <= _of_busiest(sent.values()):
                        found[number], sent[index] = finer, then[index]
                        return True
            return False

        while any(map(refine, small)):
            pass  # each change makes the error smaller, so this ends
        return found

    def _sent_with(self, layout: BucketLayout, numbers: Sequence[int], apart: Sequence[str]) -> list[int]:
        """Return the bytes that each rank sends for a bucket, with these encodings of all units."""
        pairs = zip(self.units, numbers, strict=True)
        own = [(unit, self._tuning.names[number]) for unit, number in pairs if unit.bucket == layout.index]
        encodings: dict[str, str] = {name: encoding for unit, encoding in own for name in unit.names}
        return self._sent(layout, self._tuning.exchange(encodings, apart))

    def _sent(self, layout: BucketLayout, exchange: Exchange) -> list[int]:
        """Return the bytes that each rank sends to other nodes for a bucket."""
        return [links.across for links in exchange.link_bytes(layout, self._world_size, 0)]


def _of_busiest(sent: Iterable[Sequence[int]]) -> int:
    """Return the bytes of the rank that sends most, from those of each rank for each bucket."""
    return max(map(sum, zip(*sent, strict=True)), default=0)


def _part(layout: BucketLayout, unit: TuningUnit) -> BucketLayout:
    """Return the layout of one unit of a bucket."""
    slots = [slot for slot in layout.slots if slot.name in unit.names]
    return BucketLayout.packed(layout.index, layout.dtype, slots, layout.num_shards)


def codec_of(exchange: Exchange) -> Codec:
    """Return the codec of an encoding's messages between nodes."""
    if isinstance(exchange, Scattered):
        return exchange.codec.to_owner  # sums are not sent
    assert isinstance(exchange, TwoShot | Hierarchical)
    return exchange.codec
