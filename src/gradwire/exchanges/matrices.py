"""The matrices of a bucket for low-rank exchanges, and the layouts of their factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from gradwire.buckets import BucketLayout, Slot
from gradwire.ops import Batch, Batches, Matrix, cached_on_owner

# The number of widths, from the square root down, that are tried for the one matrix of a bucket. A matrix
# that is not quite square may leave out fewer values.
_NUM_SIDES = 64


@dataclass(frozen=True, eq=False)  # compared by identity: one object per bucket
class MatrixPlan:
    """A bucket's values, divided into matrices to compress and runs to send as they are."""

    batches: Batches
    runs: tuple[tuple[int, int], ...]
    """The start and end, in the bucket, of each run of values that is sent as it is."""
    sums: BucketLayout
    """The layout of the residuals of compressed values."""
    plain: BucketLayout
    """The layout of the parameters that are not compressed, one after the other."""
    left: BucketLayout
    """The layout of all factors P."""
    right: BucketLayout
    """The layout of all factors Q."""

    @property
    def num_matrices(self) -> int:
        return len(self.batches.matrices)

    @property
    def num_plain(self) -> int:
        return sum(end - start for start, end in self.runs)


def compression_pays(rows: int, columns: int, rank: int, min_compression_rate: float) -> bool:
    """Return True if a matrix's factors are smaller by more than the rate; False for a vector."""
    return (
        min(rows, columns) > 1
        and (rows + columns) * min(rows, columns, rank) * min_compression_rate < rows * columns
    )


@cached_on_owner
def plan_of(layout: BucketLayout, rank: int, min_compression_rate: float, whole: bool) -> MatrixPlan:
    """Return one matrix per parameter worth compressing, or, with ``whole``, one matrix for the bucket."""
    matrices = _whole_matrix(layout) if whole else [_matrix(slot) for slot in layout.slots if slot.numel]
    chosen = [m for m in matrices if whole or compression_pays(m.rows, m.columns, rank, min_compression_rate)]
    by_shape: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in chosen:
        by_shape.setdefault((matrix.rows, matrix.columns), []).append(matrix)
    batches, first, sums, left, right = [], 0, 0, 0, 0
    for (rows, columns), group in by_shape.items():
        own_rank = min(rows, columns, rank)
        batches.append(Batch(tuple(group), own_rank, first, sums, left, right))
        first += len(group)
        sums += len(group) * rows * columns
        left += len(group) * own_rank * rows
        right += len(group) * own_rank * columns
    return MatrixPlan(
        batches=Batches(tuple(batches)),
        runs=_gaps(chosen, layout.numel),
        # The one matrix of a bucket has its values where the bucket has them. Its residuals go by parameter.
        sums=layout if whole else _packed(layout, [m.name for batch in batches for m in batch.matrices]),
        plain=_packed(layout, [] if whole else _uncompressed(layout, chosen)),
        left=_factors(layout, batches, lambda matrix: matrix.rows),
        right=_factors(layout, batches, lambda matrix: matrix.columns),
    )


def _matrix(slot: Slot) -> Matrix:
    """Return a parameter as a matrix: its first dimension against the rest, if memory is ordered so.

    Otherwise the dimension that is outermost in memory takes the place of the first.
    """
    strides = [(stride, dim) for dim, stride in enumerate(slot.stride) if slot.shape[dim] > 1]
    if not strides:
        return Matrix(slot.name, slot.offset, slot.numel, 1)
    outermost, innermost = max(strides)[1], min(strides)[1]
    if innermost == 0 and len(strides) > 1:  # the transpose, whose factors are the same, swapped
        columns = slot.shape[0]
        return Matrix(slot.name, slot.offset, slot.numel // columns, columns)
    rows = slot.shape[outermost]
    return Matrix(slot.name, slot.offset, rows, slot.numel // rows)


def _whole_matrix(layout: BucketLayout) -> list[Matrix]:
    """Return the bucket as one nearly square matrix that leaves out as few values as possible."""
    if layout.numel < 4:
        return []
    side = math.isqrt(layout.numel)
    columns = min(range(side, max(side - _NUM_SIDES, 1), -1), key=lambda c: layout.numel % c)
    # The factors belong to no single parameter, so the name tells apart matrices of other parameters.
    name = f"{layout.slots[0].name}..{layout.slots[-1].name} ({layout.numel} values)"
    return [Matrix(name, 0, layout.numel // columns, columns)]


def _gaps(matrices: Iterable[Matrix], numel: int) -> tuple[tuple[int, int], ...]:
    runs, position = [], 0
    for matrix in sorted(matrices, key=lambda m: m.start):
        runs.append((position, matrix.start))
        position = matrix.start + matrix.numel
    return tuple((start, end) for start, end in [*runs, (position, numel)] if end > start)


def _uncompressed(layout: BucketLayout, matrices: list[Matrix]) -> list[str]:
    names = {matrix.name for matrix in matrices}
    return [slot.name for slot in layout.slots if slot.name not in names]


def _packed(layout: BucketLayout, names: list[str]) -> BucketLayout:
    """Return the layout of these parameters, one after the other."""
    slots = {slot.name: slot for slot in layout.slots}
    return BucketLayout.packed(layout.index, layout.dtype, (slots[name] for name in names))


def _factors(layout: BucketLayout, batches: list[Batch], length_of: Callable[[Matrix], int]) -> BucketLayout:
    sizes = [(m.name, batch.rank, length_of(m)) for batch in batches for m in batch.matrices]
    slots = [Slot(name, 0, torch.Size([rank, length]), (length, 1)) for name, rank, length in sizes]
    return BucketLayout.packed(layout.index, layout.dtype, slots)
