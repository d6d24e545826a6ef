"""The two halves of an average by themselves: a reduce-scatter, and an all-gather."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.codecs import Codec
from gradwire.exchanges.context import Context
from gradwire.exchanges.links import Links
from gradwire.exchanges.residuals import add_to_shard
from gradwire.exchanges.rounds import Rounds
from gradwire.exchanges.scatter import Sum, aligned_rows, even_bounds, sum_scattered
from gradwire.exchanges.two_phase import seeds_of
from gradwire.exchanges.two_shot import may_sum_natively
from gradwire.ops import NO_SEED, Chunk, Family, Seed
from gradwire.peers import gather, gather_matrix


@dataclass(frozen=True)
class Scattered:
    """Sum each rank's chunk, and no other: rank r ends with the sum of chunk r of ``even_bounds``.

    The owner sums in fp32 (fp64 for uncompressed fp64 values) and in rank order, and does not encode the sum.
    A backend that is faster sums uncompressed values in its own order.
    Everything outside the own chunk is undefined. There is no residual: it would take one value for every
    value of every chunk, on each rank.
    """

    codec: Codec
    seed: int = 0

    communicates = True
    sees_parameters = False
    starts = (0,)

    @property
    def kernels(self) -> frozenset[Family]:
        return self.codec.kernels

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        yield from ()
        codec, group = self.codec.resolve(flat.dtype), context.group
        start, end = even_bounds(flat.numel(), group.size)[group.rank]
        if group.size == 1:
            flat.mul_(context.scale)
        elif group.native_scatter and _may_scatter_natively(codec, flat.numel(), group.size):
            group.native_scatter(flat.mul_(context.scale), flat[start:end])
        else:
            values = _working_copy(flat, codec, context)
            seeds = seeds_of(codec.to_owner, self.seed, context)
            sum_scattered([Sum(values, codec, seeds=seeds, is_scattered=True)], context)
            if values is not flat:
                flat[start:end].copy_(values[start:end])
        add_to_shard(flat[start:end], context)

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        return 0  # whoever scatters waits for the result at once

    def repeats_as(self, step: int) -> Hashable | None:
        return None

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        sent = _chunk_bytes(self.codec.resolve(layout.dtype).to_owner, layout.numel, world_size)
        return [Links(0, sum(sent) - to_own) for to_own in sent]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        return Links(0, 1)


@dataclass(frozen=True)
class Gathered:
    """Give every rank every rank's chunk; all ranks, the owner included, end with what its row decodes to."""

    codec: Codec
    seed: int = 0

    communicates = True
    sees_parameters = False
    starts = (0,)

    @property
    def kernels(self) -> frozenset[Family]:
        return self.codec.kernels

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        yield from ()
        codec, group = self.codec.resolve(flat.dtype), context.group
        if group.size == 1:
            return
        values = _working_copy(flat, codec, context)
        bounds, seeds = even_bounds(flat.numel(), group.size), seeds_of(codec, self.seed, context)
        sizes = _chunk_bytes(codec, flat.numel(), group.size)
        matrix: Tensor | None = None
        if not codec.in_place:
            matrix = aligned_rows(context.scratch, "rows", group.size, max(sizes), flat.device)
            rows = [row[:num_bytes] for row, num_bytes in zip(matrix, sizes, strict=True)]
        else:
            rows = list(values.view(torch.uint8).split(sizes))
            if len({*sizes}) == 1:
                matrix = values.view(torch.uint8).view(group.size, -1)

        def seed_of(rank: int) -> Seed:
            return NO_SEED if seeds is None else seeds.of(rank, rank)

        start, end = bounds[group.rank]
        if start < end:
            codec.encode(Chunk(values[start:end], rows[group.rank], seed=seed_of(group.rank)))
        if matrix is None:
            gather(rows, group)
        else:
            gather_matrix(matrix, sizes, group)
        for rank, ((start, end), row) in enumerate(zip(bounds, rows, strict=True)):
            if start < end:
                codec.decode(row, values[start:end], seed_of(rank))
        if values is not flat:
            flat.copy_(values)

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        return 0

    def repeats_as(self, step: int) -> Hashable | None:
        return None

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        sizes = _chunk_bytes(self.codec.resolve(layout.dtype), layout.numel, world_size)
        return [Links(0, (world_size - 1) * own) for own in sizes]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        return Links(0, 1)


def _may_scatter_natively(codec: Codec, numel: int, num_ranks: int) -> bool:
    """Return True if a backend may sum and scatter values itself: they go as they are, in equal chunks."""
    # Rows of another dtype would not do: the sum of a reduce-scatter has the bucket's own.
    return codec.in_place and may_sum_natively(codec, num_ranks) and numel % num_ranks == 0


def _working_copy(flat: Tensor, codec: Codec, context: Context) -> Tensor:
    """Return ``flat`` itself, or a copy of it in the dtype that the codec takes."""
    is_widened = flat.is_cuda and codec.widens_on_cuda and flat.dtype.itemsize == 2
    dtype = flat.dtype if is_widened else codec.works_in or flat.dtype
    return context.scratch.converted("values", flat, dtype)


def _chunk_bytes(codec: Codec, numel: int, world_size: int) -> list[int]:
    return [codec.wire_bytes(end - start) for start, end in even_bounds(numel, world_size)]
