"""Two-shot averaging: every rank sums one chunk of the bucket, then tells the others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.exchanges.context import Context
from gradwire.exchanges.handover import take_over_residuals
from gradwire.exchanges.scratch import Scratch
from gradwire.exchanges.skipped import skipped_parameters
from gradwire.ops import Family, Seed
from gradwire.transport import Group

# Chunks and rows start at multiples of this many values and bytes, for the sake of vector loads.
_ALIGNMENT = 64
_NO_SEED = Seed(0, 0)


@dataclass(frozen=True)
class TwoShot:
    """Scatter-reduce, then gather, with every message encoded by one codec.

    The owner of a chunk sums it in fp32 (fp64 for fp64 buckets that travel as they are) and in rank
    order, whatever travels, so a sum does not depend on who owns it. All ranks, the owner too, end with
    what the owner's row decodes to, so all ranks have the same bits. Over NCCL, fp32 and fp64 buckets that
    travel as they are go by NCCL's own allreduce, in an order of its own.

    Note [One residual for two shots]: with feedback, a rank adds to its gradients what its earlier rows
    have left out (Seide et al., 2014; Karimireddy et al., arXiv:1901.09847). In the chunks of others
    that is its worker residual. In its own chunk, which it need not send, it is what its rows of sums
    have left out, divided by the scale of the mean: held back from all ranks, but kept as if it were held
    back from this rank's gradients alone. So one tensor per bucket, in units of local gradients, has
    both, and it stays true whoever owns a chunk when DDP rebuilds its buckets:
    ``sum over ranks and steps of gradients == sum of results / scale + sum over ranks of residuals``.
    """

    codec: Codec
    feedback: torch.dtype | None = None
    """The dtype of residuals, if there are any."""
    seed: int = 0
    """Where stochastic rounding starts."""

    communicates = True

    @property
    def kernels(self) -> frozenset[Family]:
        return self.codec.kernels

    def __post_init__(self) -> None:
        if self.feedback is not None and not self.codec.keeps_residual:
            raise ValueError(f"{self.codec} leaves out nothing that feedback could keep")
        if self.feedback not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"residuals are torch.float32 or torch.bfloat16, not {self.feedback}")

    def run(self, flat: Tensor, context: Context) -> None:
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        take_over_residuals(flat, context, self.feedback)
        codec, group = self.codec.resolve(flat.dtype), context.group
        residual = self.residual(flat, context)
        if group.size == 1:
            average_alone(flat, residual, context)
            return
        as_it_is = codec.in_place and flat.dtype in (torch.float32, torch.float64)
        if group.native_sum is not None and as_it_is:
            group.native_sum(flat.mul_(context.scale))
            return
        values = flat
        if codec.works_in not in (None, flat.dtype):
            assert codec.works_in is not None
            values = context.scratch.like("values", flat, codec.works_in).copy_(flat)
        with self.skipping(values, residual, context):
            self.average(values, residual, context)
        if values is not flat:
            flat.copy_(values)

    def residual(self, flat: Tensor, context: Context) -> Tensor | None:
        """What earlier rows have left out of this bucket, if it is kept."""
        if self.feedback is None:
            return None
        return context.memory.flat("residual", context.layout, self.feedback, flat.device)

    def skipping(
        self, values: Tensor, residual: Tensor | None, context: Context
    ) -> contextlib.AbstractContextManager[None]:
        """Where parameters that no rank has used keep their residuals, if there can be such."""
        if residual is None or not context.may_skip or context.layout.dtype.is_complex:
            return contextlib.nullcontext()
        return skipped_parameters(values, residual, context)

    def average(self, values: Tensor, residual: Tensor | None, context: Context) -> None:
        """Average values of a dtype that the codec takes, over a group of any size."""
        group, codec = context.group, self.codec.resolve(values.dtype)
        bounds = bounds_of(values.numel(), group.size)
        chunks = [values[start:end] for start, end in bounds]
        kept = None if residual is None else [residual[start:end] for start, end in bounds]
        rows = _rows(codec, chunks, context.scratch)
        seeds = [self._seed(codec, context, chunk) for chunk in range(group.size)]
        scatter_reduce(codec, chunks, rows, context, kept, seeds)
        gather_rows(codec, chunks, rows, group)

    def _seed(self, codec: Codec, context: Context, chunk: int) -> Seed:
        """Noise of its own for every row: of this rank, in this step, of this bucket, for this chunk."""
        if not codec.stochastic:
            return _NO_SEED
        return Seed.of(self.seed, context.group.rank, context.step, context.layout.index, chunk)

    def wire_bytes(self, numel: int, dtype: torch.dtype, rank: int, world_size: int) -> int:
        if world_size == 1:
            return 0
        if dtype.is_complex:
            numel, dtype = 2 * numel, dtype.to_real()
        codec = self.codec.resolve(dtype)
        sizes = [codec.wire_bytes(end - start) for start, end in bounds_of(numel, world_size)]
        return sum(sizes) - sizes[rank] + (world_size - 1) * sizes[rank]


def scatter_reduce(
    codec: Codec,
    chunks: list[Tensor],
    rows: list[Tensor],
    context: Context,
    kept: list[Tensor] | None = None,
    seeds: list[Seed] | None = None,
) -> None:
    """Leave the sum of chunk r, over all ranks, in rank r's chunk r and, encoded, in its row r."""
    group, rank = context.group, context.group.rank
    residuals: Sequence[Tensor | None] = kept or [None] * group.size
    noise = seeds or [_NO_SEED] * group.size
    own, own_row = chunks[rank], rows[rank]
    arriving = _matrix(context.scratch, "arriving", group.size, own_row.numel(), own.device)
    messages = group.post([row[: own_row.numel()] for row in arriving])
    for peer in _peers(group):
        if rows[peer].numel():
            codec.encode(chunks[peer], rows[peer], residuals[peer], noise[peer])
        messages.send(peer, rows[peer])
    messages.finish()
    if own_row.numel():
        codec.reduce(arriving, own, rank, context.scale, own_row, residuals[rank], noise[rank])


def gather_rows(codec: Codec, chunks: list[Tensor], rows: list[Tensor], group: Group) -> None:
    """Give every rank every owner's row, and decode them."""
    messages = group.post(rows)
    for peer in _peers(group):
        messages.send(peer, rows[group.rank])
    for peer in _peers(group):
        messages.wait(peer)
        if rows[peer].numel():
            codec.decode(rows[peer], chunks[peer])
    messages.finish()


def average_alone(flat: Tensor, residual: Tensor | None, context: Context) -> None:
    """What one rank does: nothing is left out, and what was is let go."""
    if residual is not None:
        flat.add_(residual)
        residual.zero_()
    flat.mul_(context.scale)


def _peers(group: Group) -> list[int]:
    """The other ranks, each rank's list starting with its successor, so that no rank is hit by all."""
    return [(group.rank + distance) % group.size for distance in range(1, group.size)]


@functools.cache
def bounds_of(numel: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
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
