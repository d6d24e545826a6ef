"""Sums over ranks in two phases, scatter-reduce and gather, of several buckets side by side."""

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
from gradwire.ops import NO_SEED, Chunk, Scale, Seed
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
    step: int
    index: int
    """The bucket's index."""

    def of(self, rank: int, chunk: int) -> Seed:
        """Return the seed of the row in which ``rank`` encodes a chunk."""
        return Seed.of(self.seed, rank, self.step, self.index, chunk)


@dataclass(frozen=True)
class Sum:
    """Values to replace by the sum over ranks of ``values * scale``, exact or encoded."""

    values: Tensor
    codec: Codec | None = None
    residual: Tensor | None = None
    """Added to this rank's values; then it holds what the codec has left out of them."""
    seeds: Seeds | None = None
    """The seeds of a codec whose rows are random."""


class TwoPhaseReduce:
    """Sum several tensors over ranks: each rank sums one chunk of every tensor, then sends it to the others.

    A message is one row, in which every sum has a segment. Values are encoded into their segment and decoded
    from it, so sums that share a message need no further copy. Their bits do not depend on the sharing.
    """

    def __init__(self, sums: Sequence[Sum], context: Context) -> None:
        """Prepare the rows; values must be on one device, in dtypes that their codecs take."""
        group, scratch, device = context.group, context.scratch, sums[0].values.device
        codecs = [each.codec or Raw(each.values.dtype) for each in sums]
        numels = [each.values.numel() for each in sums]
        layouts = _layouts(tuple(zip(codecs, numels, strict=True)), group.size)
        to_owners = _layouts(tuple((c.to_owner, n) for c, n in zip(codecs, numels, strict=True)), group.size)
        sizes, sent_sizes = ([each[-1][1] for each in every] for every in (layouts, to_owners))
        if len(sums) == 1 and codecs[0].in_place:
            self._rows = list(sums[0].values.view(torch.uint8).split(sizes))
            self._sent = self._rows
        else:
            matrix = aligned_rows(scratch, "rows", group.size, max(*sizes, *sent_sizes), device)
            self._rows = [row[:num_bytes] for row, num_bytes in zip(matrix, sizes, strict=True)]
            # A row to an owner is sent before the owner's own row arrives in its place.
            self._sent = [row[:num_bytes] for row, num_bytes in zip(matrix, sent_sizes, strict=True)]
        self._group, self._scale = group, context.scale
        self._arriving = aligned_rows(scratch, "arriving", group.size, sent_sizes[group.rank], device)
        self._shares = []
        for number, (each, codec) in enumerate(zip(sums, codecs, strict=True)):
            sent = summed = _chunks(each, self._rows, [layout[number] for layout in layouts])
            if to_owners is not layouts:
                sent = _chunks(each, self._sent, [layout[number] for layout in to_owners])
            place = to_owners[group.rank][number]
            self._shares.append(_Share(codec, group.rank, sent, summed, place, each.seeds))

    def run(self) -> None:
        """Give every rank every sum."""
        self.scatter_reduce()
        self.gather()

    def scatter_reduce(self) -> None:
        """Leave the sum of every chunk r on rank r: in its chunk r, and encoded in its row r."""
        group, own_row = self._group, self._sent[self._group.rank]
        messages = group.post([row[: own_row.numel()] for row in self._arriving])
        for peer in _peers(group):
            for share in self._shares:
                share.encode(peer)
            messages.send(peer, self._sent[peer])
        messages.finish()
        for share in self._shares:
            share.reduce(self._arriving, group.rank, self._scale)

    def gather(self) -> None:
        """Send every rank the encoded sums of all others, and decode them."""
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
    """One of the sums: its chunks, each with its segment of a row."""

    codec: Codec
    rank: int
    sent: Sequence[Chunk]
    """Chunks with the rows that go to their owners."""
    summed: Sequence[Chunk]
    """Chunks with the rows that come from their owners."""
    place: tuple[int, int]
    """Start and end of the segment in the rows that arrive at this rank."""
    seeds: Seeds | None

    def encode(self, peer: int) -> None:
        chunk = self.sent[peer]
        if chunk.row.numel():
            self.codec.to_owner.encode(self._seeded(chunk, self.rank, peer))

    def reduce(self, arriving: Tensor, rank: int, scale: Scale) -> None:
        """Sum this rank's chunk, of which the others' parts have arrived."""
        chunk, (begin, end) = self.summed[rank], self.place
        if chunk.row.numel():
            rows = arriving[:, begin : begin + _aligned(end - begin)]
            seeds = () if self.seeds is None else [self.seeds.of(r, rank) for r in range(len(rows))]
            self.codec.reduce(self._seeded(chunk, rank, rank), rows, rank, scale, seeds)

    def decode(self, peer: int) -> None:
        chunk = self.summed[peer]
        if chunk.row.numel():
            self.codec.decode(chunk.row, chunk.values, self._seed(peer, peer))

    def _seed(self, rank: int, chunk: int) -> Seed:
        return NO_SEED if self.seeds is None else self.seeds.of(rank, chunk)

    def _seeded(self, chunk: Chunk, rank: int, number: int) -> Chunk:
        return chunk if self.seeds is None else replace(chunk, seed=self._seed(rank, number))


def _chunks(each: Sum, rows: list[Tensor], places: list[tuple[int, int]]) -> list[Chunk]:
    """Return the chunk of every rank, with its segment of that rank's row."""
    bounds, residual = bounds_of(each.values.numel(), len(rows)), each.residual
    return [
        Chunk(each.values[start:end], row[begin:stop], None if residual is None else residual[start:end])
        for (start, end), row, (begin, stop) in zip(bounds, rows, places, strict=True)
    ]


def seeds_of(codec: Codec, seed: int, context: Context) -> Seeds | None:
    """Return seeds that differ for every rank, step, bucket and chunk; None if nothing is random."""
    return Seeds(seed, context.step, context.layout.index) if codec.stochastic else None


def average_alone(flat: Tensor, residual: Tensor | None, context: Context) -> None:
    """Average on a single rank: add the residual, which then is zero, and scale."""
    if residual is not None:
        flat.add_(residual)
        residual.zero_()
    flat.mul_(context.scale)


def two_shot_bytes(codec: Codec, numel: int, world_size: int) -> list[int]:
    """Return the exact bytes that each rank sends for a sum of ``numel`` values in messages of its own."""
    bounds = bounds_of(numel, world_size)
    sent, summed = (
        [each.wire_bytes(end - start) for start, end in bounds] for each in (codec.to_owner, codec)
    )
    total = sum(sent)
    return [total - to_own + (world_size - 1) * own for to_own, own in zip(sent, summed, strict=True)]


def shared_two_shot_bytes(shapes: Sequence[tuple[Codec, int]], world_size: int) -> list[int]:
    """Return the exact bytes that each rank sends for sums that share their messages.

    ``shapes`` holds the codec and the number of values of each sum.
    """
    if not shapes or world_size == 1:
        return [0] * world_size
    to_owners = _layouts(tuple((codec.to_owner, numel) for codec, numel in shapes), world_size)
    sent, summed = (
        [layout[-1][1] for layout in each] for each in (to_owners, _layouts(tuple(shapes), world_size))
    )
    total = sum(sent)
    return [total - to_own + (world_size - 1) * own for to_own, own in zip(sent, summed, strict=True)]


def _peers(group: Group) -> list[int]:
    """Return the other ranks, starting with the successor, so that not all ranks send to the same one."""
    return [(group.rank + distance) % group.size for distance in range(1, group.size)]


@functools.lru_cache(_NUM_KEPT)
def bounds_of(numel: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Return the start and end of nearly equal chunks; some may be empty."""
    num_units = -(-numel // _ALIGNMENT)
    edges = [min(num_units * i // num_chunks * _ALIGNMENT, numel) for i in range(num_chunks)]
    return tuple(pairwise([*edges, numel]))


@functools.lru_cache(_NUM_KEPT)
def _layouts(
    shapes: tuple[tuple[Codec, int], ...], num_ranks: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the start and end of every sum's segment, for the row of each rank."""
    layouts = []
    for rank in range(num_ranks):
        end, layout = 0, []
        for codec, numel in shapes:
            first, last = bounds_of(numel, num_ranks)[rank]
            num_bytes = codec.wire_bytes(last - first)
            # An empty segment needs no alignment; it may be the last one.
            begin = _aligned(end) if num_bytes else end
            end = begin + num_bytes
            layout.append((begin, end))
        layouts.append(tuple(layout))
    return tuple(layouts)


def aligned_rows(scratch: Scratch, name: str, num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Return scratch memory of ``num_rows`` aligned rows of at least ``row_bytes`` bytes."""
    stride = _aligned(row_bytes)
    return scratch.bytes(name, num_rows * stride, device).view(num_rows, stride)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
