"""Two-shot averaging: every rank sums one chunk of the bucket, then tells the others."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.exchanges.scratch import Scratch
from gradwire.ops import Scale
from gradwire.transport import Group

# Chunks and rows start at multiples of this many values and bytes, for the sake of vector loads.
_ALIGNMENT = 64


@dataclass(frozen=True)
class TwoShot:
    """Scatter-reduce, then gather, with every message encoded by one codec.

    The owner of a chunk sums it in fp32 (fp64 for fp64 buckets) and in rank order, whatever travels, so
    a sum does not depend on who owns it. All ranks, the owner too, end with what the owner's row decodes
    to, so all ranks have the same bits. Over NCCL, fp32 and fp64 buckets that travel as they are go by
    NCCL's own allreduce, in an order of its own.
    """

    codec: Codec

    communicates = True

    def run(self, flat: Tensor, group: Group, scratch: Scratch, scale: Scale) -> None:
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        if group.size == 1:
            flat.mul_(scale)
            return
        codec = self.codec.resolve(flat.dtype)
        as_it_is = codec.in_place and flat.dtype in (torch.float32, torch.float64)
        if group.native_sum is not None and as_it_is:
            group.native_sum(flat.mul_(scale))
            return
        chunks = [flat[start:end] for start, end in _bounds(flat.numel(), group.size)]
        rows = _rows(codec, chunks, scratch)
        self._scatter_reduce(codec, chunks, rows, group, scratch, scale)
        self._gather(codec, chunks, rows, group)

    def _scatter_reduce(
        self,
        codec: Codec,
        chunks: list[Tensor],
        rows: list[Tensor],
        group: Group,
        scratch: Scratch,
        scale: Scale,
    ) -> None:
        """Leave the sum of chunk r, over all ranks, in rank r's chunk r and, encoded, in its row r."""
        own, own_row = chunks[group.rank], rows[group.rank]
        arriving = _matrix(scratch, "arriving", group.size, own_row.numel(), own.device)
        messages = group.post([row[: own_row.numel()] for row in arriving])
        for peer in _peers(group):
            if rows[peer].numel():
                codec.encode(chunks[peer], rows[peer])
            messages.send(peer, rows[peer])
        messages.finish()
        if own_row.numel():
            codec.reduce(arriving, own, group.rank, scale, own_row)

    def _gather(self, codec: Codec, chunks: list[Tensor], rows: list[Tensor], group: Group) -> None:
        """Give every rank every owner's row, and decode them."""
        messages = group.post(rows)
        for peer in _peers(group):
            messages.send(peer, rows[group.rank])
        for peer in _peers(group):
            messages.wait(peer)
            if rows[peer].numel():
                codec.decode(rows[peer], chunks[peer])
        messages.finish()

    def wire_bytes(self, numel: int, dtype: torch.dtype, rank: int, world_size: int) -> int:
        if world_size == 1:
            return 0
        if dtype.is_complex:
            numel, dtype = 2 * numel, dtype.to_real()
        codec = self.codec.resolve(dtype)
        sizes = [codec.wire_bytes(end - start) for start, end in _bounds(numel, world_size)]
        return sum(sizes) - sizes[rank] + (world_size - 1) * sizes[rank]


def _peers(group: Group) -> list[int]:
    """The other ranks, each rank's list starting with its successor, so that no rank is hit by all."""
    return [(group.rank + distance) % group.size for distance in range(1, group.size)]


@functools.lru_cache(maxsize=1024)
def _bounds(numel: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Where each of nearly equal chunks starts and ends; some may be empty."""
    num_units = -(-numel // _ALIGNMENT)
    edges = [min(num_units * i // num_chunks * _ALIGNMENT, numel) for i in range(num_chunks)]
    return tuple(pairwise([*edges, numel]))


def _rows(codec: Codec, chunks: list[Tensor], scratch: Scratch) -> list[Tensor]:
    """Where the encoded form of each chunk goes."""
    if codec.in_place:
        return [chunk.view(torch.uint8) for chunk in chunks]
    sizes = [codec.wire_bytes(chunk.numel()) for chunk in chunks]
    matrix = _matrix(scratch, "rows", len(chunks), max(sizes), chunks[0].device)
    return [row[:num_bytes] for row, num_bytes in zip(matrix, sizes, strict=True)]


def _matrix(scratch: Scratch, name: str, num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Scratch memory with ``num_rows`` aligned rows of at least ``row_bytes``."""
    stride = -(-row_bytes // _ALIGNMENT) * _ALIGNMENT
    return scratch.bytes(name, num_rows * stride, device).view(num_rows, stride)
