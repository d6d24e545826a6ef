"""Low-rank factors for matrices in CUDA memory: products by torch, in batches, and all else in Triton.

A launch costs more than its work here, so each kernel takes all matrices of a bucket at once, whatever their
shapes. A program finds its part in a table, which is copied to the device once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.batches import Batches, Side
from gradwire.ops.cuda.codes import ABS, INFINITY
from gradwire.ops.cuda.orthogonal import orthogonalize_matrices
from gradwire.ops.owner_cache import cached_on_owner
from gradwire.ops.reference import low_rank as reference
from gradwire.ops.reference.low_rank import project, project_back

__all__ = [
    "accumulate_and_project",
    "accumulate_and_project_back",
    "finish",
    "judge",
    "orthogonalize",
    "project_back",
]

# Votes as bits, which are in the same order: 0, 1, NaN.
_ONE = tl.constexpr(0x3F800000)
_NAN = tl.constexpr(0x7FC00000)
# Longer vectors do not fit into a program's registers.
_MAX_LENGTH = 1 << 16
# All shorter vectors share a launch.
_MIN_BLOCK = 1 << 12
_ROWS, _COLUMNS = 16, 128
_CHUNK = 1 << 10


@triton.jit
def _accumulate(tiles, flat, sums, votes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tiles + tl.program_id(0).to(tl.int64) * 10
    matrix, num_columns = tl.load(tile), tl.load(tile + 2)
    row = tl.load(tile + 3) + tl.arange(0, ROWS)[:, None]
    column = tl.load(tile + 4) + tl.arange(0, COLUMNS)[None, :]
    exists = (row < tl.load(tile + 1)) & (column < num_columns)
    place = row * num_columns + column
    values = tl.load(flat + tl.load(tile + 5) + place, exists, other=0.0).to(tl.float32)
    magnitude = values.to(tl.int32, bitcast=True) & ABS
    total = sums + tl.load(tile + 6) + place
    added = tl.load(total, exists, other=0.0) + tl.where(magnitude < INFINITY, values, 0.0)
    tl.store(total, added, exists)
    largest = tl.max(tl.max(magnitude, axis=1), axis=0)
    vote = tl.where(largest >= INFINITY, _NAN, tl.where(largest > 0, _ONE, 0))
    tl.atomic_max(votes + matrix, vote)


@triton.jit
def _chunk(matrices, num_chunks, CHUNK: tl.constexpr):
    """Return this program's matrix, the places of its values in a factor, and a mask of those that exist."""
    # A grid has 2**31 programs in its first dimension, but only 65535 in the others.
    k, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    entry = matrices + 3 * k
    start, size = tl.load(entry), tl.load(entry + 1) * tl.load(entry + 2)
    place = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    return k, start + place, place < size


@triton.jit
def _judge(matrices, factor, votes, num_chunks, CHUNK: tl.constexpr):
    k, places, exist = _chunk(matrices, num_chunks, CHUNK)
    found = tl.load(factor + places, exist, other=0.0).to(tl.int32, bitcast=True) & ABS
    if tl.max(found, axis=0) >= INFINITY:
        tl.atomic_max(votes + k, _NAN)


@triton.jit
def _keep(matrices, factor, votes, kept, num_chunks, CHUNK: tl.constexpr):
    k, places, exist = _chunk(matrices, num_chunks, CHUNK)
    if tl.load(votes + k) > 0.0:
        tl.store(kept + places, tl.load(factor + places, exist), exist)


@triton.jit
def _finish(
    tiles,
    flat,
    sums,
    left,
    right,
    own_left,
    own_right,
    votes,
    HAS_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 10
    matrix, num_rows, num_columns = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    row = tl.load(tile + 3) + tl.arange(0, ROWS)
    column = tl.load(tile + 4) + tl.arange(0, COLUMNS)
    p_place, q_place, rank = tl.load(tile + 7) + row, tl.load(tile + 8) + column, tl.load(tile + 9)
    counts = tl.load(votes + matrix)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    sent = tl.zeros([ROWS, COLUMNS], tl.float32)
    for c in range(rank):
        p = tl.load(left + p_place + c * num_rows, row < num_rows, other=0.0)
        q = tl.load(right + q_place + c * num_columns, column < num_columns, other=0.0)
        product += p[:, None] * q[None, :]
        if HAS_SUMS:
            p = tl.load(own_left + p_place + c * num_rows, row < num_rows, other=0.0)
            q = tl.load(own_right + q_place + c * num_columns, column < num_columns, other=0.0)
            sent += p[:, None] * q[None, :]
    exists = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row[:, None] * num_columns + column[None, :]
    values = flat + tl.load(tile + 5) + place
    if HAS_SUMS:
        # The values are read only where the vote is not positive, which is rare.
        needed = (row < tl.where(counts > 0.0, 0, num_rows))[:, None]
        added = tl.load(values, exists & needed, other=0.0).to(tl.float32)
        added = tl.where((added.to(tl.int32, bitcast=True) & ABS) < INFINITY, added, 0.0)
        total = sums + tl.load(tile + 6) + place
        rest = tl.load(total, exists, other=0.0) - tl.where(counts > 0.0, sent, added)
        tl.store(total, rest, exists)
    tl.store(values, tl.where(counts > 0.0, product, counts).to(flat.dtype.element_ty), exists)


def accumulate_and_project(
    batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor, right: Tensor, left: Tensor
) -> None:
    accumulate(batches, flat, sums, votes)
    project(batches, sums, right, left)


def accumulate_and_project_back(
    batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor, left: Tensor, right: Tensor
) -> None:
    accumulate(batches, flat, sums, votes)
    project_back(batches, sums, left, right)


def accumulate(batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor) -> None:
    if sums.dtype != torch.float32:
        reference.accumulate(batches, flat, sums, votes)
        return
    tiles = _tiles(batches, sums.device)
    bits = votes.zero_().view(torch.int32)
    _accumulate[(len(tiles),)](tiles, flat, sums, bits, ROWS=_ROWS, COLUMNS=_COLUMNS)


def judge(batches: Batches, side: Side, factor: Tensor, votes: Tensor, kept: Tensor | None) -> None:
    if factor.dtype != torch.float32:
        reference.judge(batches, side, factor, votes, kept)
        return
    matrices = _matrices(batches, side, 0, factor.device)
    num_chunks = triton.cdiv(max(batch.rank * batch.length(side) for batch in batches), _CHUNK)
    grid = (len(matrices) * num_chunks,)
    _judge[grid](matrices, factor, votes.view(torch.int32), num_chunks, CHUNK=_CHUNK)
    if kept is not None:
        _keep[grid](matrices, factor, votes, kept, num_chunks, CHUNK=_CHUNK)


def finish(
    batches: Batches,
    flat: Tensor,
    sums: Tensor | None,
    left: Tensor,
    right: Tensor,
    own_left: Tensor,
    own_right: Tensor,
    votes: Tensor,
) -> None:
    if left.dtype != torch.float32:
        reference.finish(batches, flat, sums, left, right, own_left, own_right, votes)
        return
    tiles = _tiles(batches, flat.device)
    totals = left if sums is None else sums
    factors = left, right, own_left, own_right
    _finish[(len(tiles),)](
        tiles,
        flat,
        totals,
        *factors,
        votes,
        HAS_SUMS=sums is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        enable_fp_fusion=True,  # Triton's own default changes, and ranks may have different versions
    )


def orthogonalize(batches: Batches, side: Side, factor: Tensor, spare: Tensor | None) -> None:
    blocks = _blocks(batches, side)
    if factor.dtype != torch.float32 or blocks[-1] > _MAX_LENGTH:
        reference.orthogonalize(batches, side, factor, spare)
        return
    rank = max(batch.rank for batch in batches)
    for block in blocks:
        orthogonalize_matrices(_matrices(batches, side, block, factor.device), factor, spare, rank, block)


def _on(device: torch.device, table: Sequence[tuple[int, ...]]) -> Tensor:
    """Copy a table to the device, without making the host wait."""
    rows = torch.tensor(table, dtype=torch.int64, device="cpu")  # the default device may be another
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


@cached_on_owner
def _tiles(batches: Batches, device: torch.device) -> Tensor:
    """Return a row for each tile.

    Its columns are matrix, rows, columns, first row, first column, the starts of values, sums, left and right
    factor, and rank.
    """
    tiles = [
        (
            batch.first + k,
            batch.rows,
            batch.columns,
            row,
            column,
            matrix.start,
            batch.sums_start + k * matrix.numel,
            batch.left_start + k * batch.rank * batch.rows,
            batch.right_start + k * batch.rank * batch.columns,
            batch.rank,
        )
        for batch in batches
        for k, matrix in enumerate(batch.matrices)
        for row in range(0, batch.rows, _ROWS)
        for column in range(0, batch.columns, _COLUMNS)
    ]
    return _on(device, tiles)


@cached_on_owner
def _matrices(batches: Batches, side: Side, block: int, device: torch.device) -> Tensor:
    """Return the factor's start, rank and length for each matrix whose vectors take this block; 0 is any."""
    matrices = [
        (
            (batch.left_start if side == "left" else batch.right_start) + k * batch.rank * batch.length(side),
            batch.rank,
            batch.length(side),
        )
        for batch in batches
        for k in range(len(batch.matrices))
        if block in (0, _block(batch.length(side)))
    ]
    return _on(device, matrices)


@cached_on_owner
def _blocks(batches: Batches, side: Side) -> tuple[int, ...]:
    return tuple(sorted({_block(batch.length(side)) for batch in batches}))


def _block(length: int) -> int:
    return max(int(triton.next_power_of_2(length)), _MIN_BLOCK)
