"""Sums over ranks in two shots, of several buckets side by side."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.scratch import Scratch
from gradwire.ops import Chunk, Scale, Seed
from gradwire.peers import Group

# Chunks, rows and segments start at multiples of this many values and bytes, for the sake of vector loads.
_ALIGNMENT = 64
_NO_SEED = Seed(0, 0)
# Of how many sums the places are kept: those of a model with hundreds of buckets, and of a few more models.
# One more is found again in microseconds for each rank.
_NUM_KEPT = 2048


@dataclass(frozen=True)
class Sum:
    """Values that are to become the sum over ranks of ``values * scale``: exactly, or as a codec has them."""

    values: Tensor
    codec: Codec | None = None
    residual: Tensor | None = None
    """Is added to this rank's values, and becomes what the codec leaves out of them."""
    seeds: Sequence[Seed] | None = None
    """Where rounding by chance starts, for each rank's chunk."""


class TwoPhaseReduce:
    """Every rank sums one chunk of each of the values, then tells the others.

    What a rank sends to another is one row, in which each of the sums has a segment that it is encoded to and
    decoded from, so what shares a message is not copied together, and is the same bits as what goes alone.
    """

    def __init__(self, sums: Sequence[Sum], context: Context) -> None:
        """Sum values of dtypes that their codecs take, which must lie on one device."""
        group, scratch, device = context.group, context.scratch, sums[0].values.device
        codecs = [each.codec or Raw(each.values.dtype) for each in sums]
        numels = [each.values.numel() for each in sums]
        layouts = _layouts(tuple(zip(codecs, numels, strict=True)), group.size)
        sizes = [layout[-1][1] for layout in layouts]
        if len(sums) == 1 and codecs[0].in_place:
            self._rows = list(sums[0].values.view(torch.uint8).split(sizes))
        else:
            matrix = aligned_rows(scratch, "rows", group.size, max(sizes), device)
            self._rows = [row[:num_bytes] for row, num_bytes in zip(matrix, sizes, strict=True)]
        self._group, self._scale = group, context.scale
        self._arriving = aligned_rows(scratch, "arriving", group.size, sizes[group.rank], device)
        self._shares = [
            _Share.of(each, codec, self._rows, [layout[number] for layout in layouts])
            for number, (each, codec) in enumerate(zip(sums, codecs, strict=True))
        ]

    def run(self) -> None:
        """Give every rank every sum."""
        self.scatter_reduce()
        self.gather()

    def scatter_reduce(self) -> None:
        """Leave the sums of chunks r, over all ranks, in rank r's chunks r and, encoded, in its row r."""
        group, own_row = self._group, self._rows[self._group.rank]
        messages = group.post([row[: own_row.numel()] for row in self._arriving])
        for peer in _peers(group):
            for share in self._shares:
                share.encode(peer)
            messages.send(peer, self._rows[peer])
        messages.finish()
        for share in self._shares:
            share.reduce(self._arriving, group.rank, self._scale)

    def gather(self) -> None:
        """Give every rank every owner's row, and decode them."""
        group = self._group
        messages = group.post(self._rows)
        for peer in _peers(group):
            messages.send(peer, self._rows[group.rank])
        for peer in _peers(group):
            messages.wait(peer)
            for share in self._shares:
                share.decode(peer)
        messages.finish()


@dataclass(frozen=True)
class _Share:
    """One of the sums: its chunks, each with its segment of a row, and where the segments begin."""

    codec: Codec
    chunks: Sequence[Chunk]
    begins: Sequence[int]

    @classmethod
    def of(cls, each: Sum, codec: Codec, rows: list[Tensor], places: list[tuple[int, int]]) -> _Share:
        bounds = bounds_of(each.values.numel(), len(rows))
        seeds, residual = each.seeds or [_NO_SEED] * len(rows), each.residual
        chunks = [
            Chunk(
                each.values[start:end],
                row[begin:stop],
                None if residual is None else residual[start:end],
                seed,
            )
            for (start, end), row, (begin, stop), seed in zip(bounds, rows, places, seeds, strict=True)
        ]
        return cls(codec, chunks, [begin for begin, _ in places])

    def encode(self, peer: int) -> None:
        if self.chunks[peer].row.numel():
            self.codec.encode(self.chunks[peer])

    def reduce(self, arriving: Tensor, rank: int, scale: Scale) -> None:
        """Sum this rank's chunk, of which the others' parts have arrived."""
        chunk, begin = self.chunks[rank], self.begins[rank]
        if chunk.row.numel():
            rows = arriving[:, begin : begin + _aligned(chunk.row.numel())]
            self.codec.reduce(chunk, rows, rank, scale)

    def decode(self, peer: int) -> None:
        chunk = self.chunks[peer]
        if chunk.row.numel():
            self.codec.decode(chunk.row, chunk.values)


def seeds_of(codec: Codec, seed: int, context: Context) -> list[Seed] | None:
    """Noise of its own for every row: of this rank, in this step, of this bucket, for each chunk."""
    if not codec.stochastic:
        return None
    rank, size, index = context.group.rank, context.group.size, context.layout.index
    return [Seed.of(seed, rank, context.step, index, chunk) for chunk in range(size)]


def average_alone(flat: Tensor, residual: Tensor | None, context: Context) -> None:
    """What one rank does: nothing is left out, and what was is let go."""
    if residual is not None:
        flat.add_(residual)
        residual.zero_()
    flat.mul_(context.scale)


def two_shot_bytes(codec: Codec, numel: int, world_size: int) -> list[int]:
    """The exact bytes that each rank sends for the sum of ``numel`` values that share no message."""
    sizes = [codec.wire_bytes(end - start) for start, end in bounds_of(numel, world_size)]
    total = sum(sizes)
    return [total - own + (world_size - 1) * own for own in sizes]


def _peers(group: Group) -> list[int]:
    """The other ranks, each rank's list starting with its successor, so that no rank is hit by all."""
    return [(group.rank + distance) % group.size for distance in range(1, group.size)]


@functools.lru_cache(_NUM_KEPT)
def bounds_of(numel: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Where each of nearly equal chunks starts and ends; some may be empty."""
    num_units = -(-numel // _ALIGNMENT)
    edges = [min(num_units * i // num_chunks * _ALIGNMENT, numel) for i in range(num_chunks)]
    return tuple(pairwise([*edges, numel]))


@functools.lru_cache(_NUM_KEPT)
def _layouts(
    shapes: tuple[tuple[Codec, int], ...], num_ranks: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Where in the row of each rank's chunks the segments of so many values begin and end."""
    layouts = []
    for rank in range(num_ranks):
        end, layout = 0, []
        for codec, numel in shapes:
            first, last = bounds_of(numel, num_ranks)[rank]
            num_bytes = codec.wire_bytes(last - first)
            # An empty one, which may be the last, needs no room before it.
            begin = _aligned(end) if num_bytes else end
            end = begin + num_bytes
            layout.append((begin, end))
        layouts.append(tuple(layout))
    return tuple(layouts)


def aligned_rows(scratch: Scratch, name: str, num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Scratch memory with ``num_rows`` aligned rows of at least ``row_bytes``."""
    stride = _aligned(row_bytes)
    return scratch.bytes(name, num_rows * stride, device).view(num_rows, stride)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
