"""The first phase of a sum over ranks: every rank gets its chunk of all ranks' values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.scratch import Scratch
from gradwire.ops import NO_SEED, Chunk, Seed
from gradwire.peers import Group

# Chunks start at multiples of this many values, rows and segments at multiples of this many bytes, so that
# kernels can use vector loads.
_ALIGNMENT = 64
# The number of cached layouts: enough for a few models with hundreds of buckets each. A miss costs a few
# microseconds per rank.
_NUM_KEPT = 2048


@dataclass(frozen=True)
class Seeds:
    """Seeds of the rows of one bucket in one step, which every rank can compute for every other."""

    seed: int
    step: int | Tensor
    """The training step; on the device, if the exchange is recorded."""
    index: int
    """The bucket's index."""

    def of(self, rank: int, chunk: int) -> Seed:
        """Return the seed of the row in which ``rank`` encodes a chunk."""
        return self.of_chunk(chunk).of_rank(rank)

    def of_chunk(self, chunk: int) -> Seed:
        """Return the seed of a chunk, from which each rank's own is made."""
        return Seed.of(self.seed, self.index, chunk).of_step(self.step)


@dataclass(frozen=True)
class Sum:
    """Values to replace by the sum over ranks of ``values * scale``, exact or encoded."""

    values: Tensor
    codec: Codec | None = None
    residual: Tensor | None = None
    """Added to this rank's values; then it holds what the codec has left out of them."""
    seeds: Seeds | None = None
    """The seeds of a codec whose rows are random."""
    is_scattered: bool = False
    """True if rank r needs the sum of chunk r alone; its other values are then undefined.

    Chunks are those of `even_bounds`, and the sum is not encoded.
    """
    in_one_round: bool = False
    """True if every rank must send all its values to every other, and add up what it gets."""
    sent: Tensor | None = None
    """Memory for this rank's values as others decode them, which only a sum in one round can tell."""

    def bounds(self, num_ranks: int) -> tuple[tuple[int, int], ...]:
        """Return the start and end of every rank's chunk."""
        return bounds_of(self.values.numel(), num_ranks, 1 if self.is_scattered else _ALIGNMENT)

    def row_seed(self, rank: int, chunk: int) -> Seed:
        """Return the seed of the row in which ``rank`` encodes a chunk."""
        return NO_SEED if self.seeds is None else self.seeds.of(rank, chunk)

    def chunk_seed(self, chunk: int) -> Seed:
        """Return the seed of a chunk, from which each rank's own is made."""
        return NO_SEED if self.seeds is None else self.seeds.of_chunk(chunk)

    def seeded(self, chunk: Chunk, rank: int, number: int) -> Chunk:
        """Return chunk ``number`` with the seed of the row in which ``rank`` encodes it."""
        return chunk if self.seeds is None else replace(chunk, seed=self.seeds.of(rank, number))

    @property
    def used_codec(self) -> Codec:
        """The codec; `Raw` for exact values."""
        return self.codec or Raw(self.values.dtype)


class Scatter:
    """Chunks of several tensors on their way to their owners.

    A message is one row, in which every sum has a segment. Values are encoded into their segment and summed
    from it, so sums that share a message need no further copy. Their bits do not depend on the sharing.

    Note [Two ranks gather]: a rank of two has one row to send, which the other gets. So their exchange of
    chunks is also a gathering of two rows, and NCCL's own takes 0.54 of the time of its reduce-scatter where
    messages take 0.7. The row to send lies among those that arrive: the own one of these is not read. An
    average in two phases, of which the second gathers too, passes its own rows and uses messages.
    """

    def __init__(self, sums: Sequence[Sum], context: Context, rows: Sequence[Tensor] | None = None) -> None:
        """Prepare the rows; values must be on one device, in dtypes that their codecs take.

        ``rows`` is memory for the row to each rank, of at least `row_sizes` bytes; by default it is made.
        """
        group, device = context.group, sums[0].values.device
        codecs = [each.used_codec.to_owner for each in sums]
        layouts = row_layouts(sums, codecs, group.size)
        sizes = row_sizes(layouts)
        if rows is None:
            rows = values_as_rows(sums, sizes)
        self._gather = group.native_gather if rows is None and group.size == 2 else None
        arriving_bytes = sizes[group.rank] if self._gather is None else max(sizes)
        self._arriving = aligned_rows(context.scratch, "arriving", group.size, arriving_bytes, device)
        if self._gather is not None:
            rows = [self._arriving[group.rank]] * 2  # see Note [Two ranks gather]
        if rows is None:
            rows = aligned_rows(context.scratch, "rows", group.size, max(sizes), device).unbind()
        self._group = group
        self._rows = [row[:num_bytes] for row, num_bytes in zip(rows, sizes, strict=True)]
        self.chunks = chunks_of(sums, self._rows, layouts)
        """The chunks of each sum, with their segments of the rows."""
        self._segments = [
            _Segment(each, codec, chunks, place)
            for each, codec, chunks, place in zip(sums, codecs, self.chunks, layouts[group.rank], strict=True)
        ]

    def post(self) -> None:
        """Begin to receive this rank's chunk of every other rank."""
        if self._gather is None:
            own_bytes = self._rows[self._group.rank].numel()
            self._messages = self._group.post(self._arriving[:, :own_bytes].unbind())

    def run(self) -> None:
        """Send every chunk to its owner, and wait for this rank's chunk of every other rank."""
        if self._gather is not None:
            (peer,) = peers_of(self._group)
            self._encode(peer)
            self._gather(self._arriving, self._rows[peer].numel())
            return
        for peer in peers_of(self._group):
            self._encode(peer)
            self._messages.send(peer, self._rows[peer])
        self._messages.finish()

    def _encode(self, peer: int) -> None:
        for segment in self._segments:
            segment.encode(self._group.rank, peer)

    def terms(self, number: int) -> tuple[Tensor, Seed]:
        """Return the rows that have arrived for one of the sums, and the seed of this rank's chunk."""
        segment = self._segments[number]
        begin, end = segment.place
        rows = self._arriving[:, begin : begin + aligned(end - begin)]
        return rows, segment.sum.chunk_seed(self._group.rank)


def sum_scattered(sums: Sequence[Sum], context: Context) -> None:
    """Leave the sum of every chunk r on rank r, in its chunk r."""
    scatter, rank = Scatter(sums, context), context.group.rank
    scatter.post()
    scatter.run()
    for number, each in enumerate(sums):
        start, end = each.bounds(context.group.size)[rank]
        if start < end:
            rows, seed = scatter.terms(number)
            each.used_codec.sum(each.values[start:end], rows, rank, context.scale, seed)


@dataclass(frozen=True)
class _Segment:
    """One sum's part of every row."""

    sum: Sum
    codec: Codec
    """The encoding of rows to owners."""
    chunks: Sequence[Chunk]
    place: tuple[int, int]
    """Start and end in the rows that arrive at this rank."""

    def encode(self, rank: int, peer: int) -> None:
        chunk = self.chunks[peer]
        if chunk.row.numel():
            self.codec.encode(self.sum.seeded(chunk, rank, peer))


def chunks_of(sums: Sequence[Sum], rows: Sequence[Tensor], layouts: RowLayouts) -> list[list[Chunk]]:
    """Return each sum's chunk for every rank, with its segment of that rank's row."""
    return [
        [
            Chunk(
                each.values[start:end],
                row[begin:stop],
                None if each.residual is None else each.residual[start:end],
            )
            for (start, end), row, (begin, stop) in zip(each.bounds(len(rows)), rows, places, strict=True)
        ]
        for each, places in zip(sums, zip(*layouts, strict=True), strict=True)
    ]


def values_as_rows(sums: Sequence[Sum], sizes: Sequence[int]) -> Sequence[Tensor] | None:
    """Return the memory of the values as rows, if a codec sends it as it is; None if rows must be made."""
    if len(sums) == 1 and sums[0].used_codec.in_place:
        rows: Sequence[Tensor] = sums[0].values.view(torch.uint8).split(list(sizes))
        return rows
    return None


def peers_of(group: Group) -> list[int]:
    """Return the other ranks, starting with the successor, so that not all ranks send to the same one."""
    return [(group.rank + distance) % group.size for distance in range(1, group.size)]


def even_bounds(numel: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Return the chunks of a reduce-scatter: of one size, or of two that differ by one.

    >>> even_bounds(8, 2), even_bounds(7, 3)
    (((0, 4), (4, 8)), ((0, 2), (2, 4), (4, 7)))
    """
    return bounds_of(numel, num_chunks, 1)


@functools.lru_cache(_NUM_KEPT)
def bounds_of(numel: int, num_chunks: int, alignment: int = _ALIGNMENT) -> tuple[tuple[int, int], ...]:
    """Return the start and end of nearly equal chunks; some may be empty."""
    num_units = -(-numel // alignment)
    edges = [min(num_units * i // num_chunks * alignment, numel) for i in range(num_chunks)]
    return tuple(pairwise([*edges, numel]))


RowLayouts = tuple[tuple[tuple[int, int], ...], ...]
"""The start and end of every sum's segment, for the row of each rank."""


def row_layouts(sums: Sequence[Sum], codecs: Sequence[Codec], num_ranks: int) -> RowLayouts:
    """Return the layouts of rows in which ``codecs`` encode the chunks of ``sums``."""
    shapes = (
        (codec, each.values.numel(), each.is_scattered) for each, codec in zip(sums, codecs, strict=True)
    )
    return _row_layouts(tuple(shapes), num_ranks)


def layouts_of(shapes: Sequence[tuple[Codec, int]], num_ranks: int) -> RowLayouts:
    """Return the layouts of rows with a segment for each codec and number of values."""
    return _row_layouts(tuple((codec, numel, False) for codec, numel in shapes), num_ranks)


@functools.lru_cache(_NUM_KEPT)
def _row_layouts(shapes: tuple[tuple[Codec, int, bool], ...], num_ranks: int) -> RowLayouts:
    layouts = []
    for rank in range(num_ranks):
        end, layout = 0, []
        for codec, numel, is_scattered in shapes:
            first, last = bounds_of(numel, num_ranks, 1 if is_scattered else _ALIGNMENT)[rank]
            num_bytes = codec.wire_bytes(last - first)
            # An empty segment needs no alignment; it may be the last one.
            begin = aligned(end) if num_bytes else end
            end = begin + num_bytes
            layout.append((begin, end))
        layouts.append(tuple(layout))
    return tuple(layouts)


def row_sizes(layouts: RowLayouts) -> list[int]:
    """Return the bytes of the row of each rank."""
    return [layout[-1][1] for layout in layouts]


def aligned_rows(scratch: Scratch, name: str, num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Return scratch memory of ``num_rows`` aligned rows of at least ``row_bytes`` bytes."""
    stride = aligned(row_bytes)
    return scratch.bytes(name, num_rows * stride, device).view(num_rows, stride)


def aligned(num_bytes: int) -> int:
    """Return the next multiple at which a row or a segment may start."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
