"""Which matrices a bucket holds for low-rank exchanges, and where their factors lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from gradwire.buckets import BucketLayout, Slot
from gradwire.ops import Batch, Batches, Matrix, cached_on_owner

# How far from a square the one matrix of a bucket may be, to leave out fewer values.
_NUM_SIDES = 64


@dataclass(frozen=True, eq=False)  # one object for each bucket, not compared field by field
class Plan:
    """What becomes of each value of a bucket: compressed in a matrix, or sent as it is."""

    batches: Batches
    runs: tuple[tuple[int, int], ...]
    """Where what is sent as it is begins and ends."""
    sums: BucketLayout
    """Where the residuals of compressed values lie."""
    plain: BucketLayout
    """Where parameters lie of which nothing is compressed, one after the other."""
    left: BucketLayout
    right: BucketLayout

    @property
    def num_matrices(self) -> int:
        return len(self.batches.matrices)

    @property
    def num_plain(self) -> int:
        return sum(end - start for start, end in self.runs)


def pays(rows: int, columns: int, rank: int, min_compression_rate: float) -> bool:
    """Whether the factors of a matrix are that much smaller than the matrix; a vector has none."""
    return (
        min(rows, columns) > 1
        and (rows + columns) * min(rows, columns, rank) * min_compression_rate < rows * columns
    )


@cached_on_owner
def plan_of(layout: BucketLayout, rank: int, min_compression_rate: float, whole: bool) -> Plan:
    """One matrix for each parameter for which that pays, or with ``whole`` one for all of the bucket."""
    matrices = _whole(layout) if whole else [_matrix(slot) for slot in layout.slots if slot.numel]
    chosen = [m for m in matrices if whole or pays(m.rows, m.columns, rank, min_compression_rate)]
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
    return Plan(
        batches=Batches(tuple(batches)),
        runs=_between(chosen, layout.numel),
        # One matrix for all holds its values where the bucket does, and their residuals go by parameter.
        sums=layout if whole else _packed(layout, [m.name for batch in batches for m in batch.matrices]),
        plain=_packed(layout, [] if whole else _others(layout, chosen)),
        left=_factors(layout, batches, lambda matrix: matrix.rows),
        right=_factors(layout, batches, lambda matrix: matrix.columns),
    )


def _matrix(slot: Slot) -> Matrix:
    """The first dimension against the rest, as far as memory has it so; else memory's own outermost."""
    strides = [(stride, dim) for dim, stride in enumerate(slot.stride) if slot.shape[dim] > 1]
    if not strides:
        return Matrix(slot.name, slot.offset, slot.numel, 1)
    outermost, innermost = max(strides)[1], min(strides)[1]
    if innermost == 0 and len(strides) > 1:  # its transpose, which has the same factors
        columns = slot.shape[0]
        return Matrix(slot.name, slot.offset, slot.numel // columns, columns)
    rows = slot.shape[outermost]
    return Matrix(slot.name, slot.offset, rows, slot.numel // rows)


def _whole(layout: BucketLayout) -> list[Matrix]:
    """The most nearly square matrix that leaves out next to nothing of the bucket."""
    if layout.numel < 4:
        return []
    side = math.isqrt(layout.numel)
    columns = min(range(side, max(side - _NUM_SIDES, 1), -1), key=lambda c: layout.numel % c)
    # Its factors belong to no parameter: another set of parameters is another matrix.
    name = f"{layout.slots[0].name}..{layout.slots[-1].name} ({layout.numel} values)"
    return [Matrix(name, 0, layout.numel // columns, columns)]


def _between(matrices: Iterable[Matrix], numel: int) -> tuple[tuple[int, int], ...]:
    runs, position = [], 0
    for matrix in sorted(matrices, key=lambda m: m.start):
        runs.append((position, matrix.start))
        position = matrix.start + matrix.numel
    return tuple((start, end) for start, end in [*runs, (position, numel)] if end > start)


def _others(layout: BucketLayout, matrices: list[Matrix]) -> list[str]:
    names = {matrix.name for matrix in matrices}
    return [slot.name for slot in layout.slots if slot.name not in names]


def _packed(layout: BucketLayout, names: list[str]) -> BucketLayout:
    """These parameters, one after the other."""
    slots = {slot.name: slot for slot in layout.slots}
    return BucketLayout.packed(layout.index, layout.dtype, (slots[name] for name in names))


def _factors(layout: BucketLayout, batches: list[Batch], length_of: Callable[[Matrix], int]) -> BucketLayout:
    sizes = [(m.name, batch.rank, length_of(m)) for batch in batches for m in batch.matrices]
    slots = [Slot(name, 0, torch.Size([rank, length]), (length, 1)) for name, rank, length in sizes]
    return BucketLayout.packed(layout.index, layout.dtype, slots)
