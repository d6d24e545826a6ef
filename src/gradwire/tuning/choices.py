"""Choices of an encoding for each parameter, and what they send and leave out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.buckets import BucketLayout
from gradwire.codecs import Codec
from gradwire.exchanges import Exchange, Hierarchical, Scattered, TwoShot
from gradwire.recipes import Tuning
from gradwire.tuning.allocation import allocate
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.units import TuningUnit, units_of

# A sample is off by a few percent, and so is one step from the next.
_MARGIN = 0.95
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


class Choosing:
    """Makes choices for the buckets of a model, and knows their bytes."""

    def __init__(self, layouts: Sequence[BucketLayout], tuning: Tuning, world_size: int) -> None:
        self.units: tuple[TuningUnit, ...] = units_of(layouts, tuning.tables)
        self._layouts = tuple(layouts)
        self._tuning = tuning
        self._world_size = world_size
        # Samples are fp32, whatever the buckets are.
        self.codecs: list[Codec] = [
            codec_of(exchange).resolve(torch.float32) for _, exchange in tuning.encodings
        ]

    @property
    def num_encodings(self) -> int:
        return len(self._tuning.encodings)

    def best(self, table: ErrorTable, num_allowed: int) -> EncodingChoice:
        """Return the best choice from the ``num_allowed`` finest encodings."""
        allowed = [self._num_allowed(unit, num_allowed) for unit in self.units]
        num_phases = 1 if self._tuning.is_scattered else 2
        sent = num_phases * (self._world_size - 1) / self._world_size
        num_bytes = [
            [sent * _wire_bytes(unit, codec) for codec in self.codecs[:n]]
            for unit, n in zip(self.units, allowed, strict=True)
        ]
        errors = [row[:n] for row, n in zip(self._relative(table), allowed, strict=True)]
        if (limit := self._tuning.max_bytes) is None:
            max_error = (_MARGIN * self._tuning.budget) ** 2
            return self._choice(allocate(num_bytes, errors, max_error=max_error), table)
        # Messages have a few bytes of padding, which the units do not know of.
        target = limit
        for _ in range(_NUM_ATTEMPTS):
            choice = self._choice(allocate(num_bytes, errors, max_bytes=target), table)
            if choice.num_bytes <= limit:
                break
            target -= choice.num_bytes - limit
        return choice

    def again(self, choice: EncodingChoice | None, table: ErrorTable | None) -> EncodingChoice:
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
        exchange = self._tuning.exchange(encodings)
        sent = [exchange.link_bytes(layout, self._world_size, 0) for layout in self._layouts]
        num_bytes = max((sum(links.across for links in rank) for rank in zip(*sent, strict=True)), default=0)
        error = None
        if table is not None and any(table.norms):
            left_out = (row[n] for row, n in zip(self._relative(table), numbers, strict=True))
            error = math.sqrt(math.fsum(left_out))
        return EncodingChoice(encodings, num_bytes, error)


def _wire_bytes(unit: TuningUnit, codec: Codec) -> int:
    """Return the bytes of a unit's values; chunks are encoded one by one, each in whole blocks."""
    return unit.num_chunks * codec.wire_bytes(unit.chunk_numel)


def codec_of(exchange: Exchange) -> Codec:
    """Return the codec of an encoding's messages between nodes."""
    if isinstance(exchange, Scattered):
        return exchange.codec.to_owner  # sums are not sent
    assert isinstance(exchange, TwoShot | Hierarchical)
    return exchange.codec
