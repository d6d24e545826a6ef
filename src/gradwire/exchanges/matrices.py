"""Which matrices a bucket holds for low-rank exchanges, and where their factors lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.layout import BucketLayout, Slot

# How far from a square the one matrix of a bucket may be, to leave out fewer values.
_NUM_SIDES = 64


@dataclass(frozen=True)
class Matrix:
    """A run of a bucket's values, as a matrix in memory's own order."""

    name: str
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def view(self, flat: Tensor) -> Tensor:
        """The matrix's values in a bucket."""
        return flat[self.start : self.start + self.numel].view(self.rows, self.columns)


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape, and where each of their states begins, one matrix after the other."""

    matrices: tuple[Matrix, ...]
    rank: int
    first: int
    """How many matrices stand in batches before."""
    sums_start: int
    left_start: int
    right_start: int

    @property
    def slice(self) -> slice:
        return slice(self.first, self.first + len(self.matrices))

    def sums(self, flat: Tensor) -> Tensor:
        """(k, rows, columns)."""
        shape = len(self.matrices), self.matrices[0].rows, self.matrices[0].columns
        return _part(flat, self.sums_start, shape)

    def left(self, flat: Tensor) -> Tensor:
        """(k, rank, rows)."""
        return _part(flat, self.left_start, (len(self.matrices), self.rank, self.matrices[0].rows))

    def right(self, flat: Tensor) -> Tensor:
        """(k, rank, columns)."""
        return _part(flat, self.right_start, (len(self.matrices), self.rank, self.matrices[0].columns))


@dataclass(frozen=True)
class Plan:
    """What becomes of each value of a bucket: compressed in a matrix, or sent as it is."""

    batches: tuple[Batch, ...]
    runs: tuple[tuple[int, int], ...]
    """Where what is sent as it is begins and ends."""
    sums: BucketLayout
    """Where the residuals of compressed values lie."""
    left: BucketLayout
    right: BucketLayout

    @property
    def num_matrices(self) -> int:
        return sum(len(batch.matrices) for batch in self.batches)

    @property
    def num_plain(self) -> int:
        return sum(end - start for start, end in self.runs)

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for batch in self.batches for matrix in batch.matrices]


def pays(rows: int, columns: int, rank: int, min_compression_rate: float) -> bool:
    """Whether the factors of a matrix are that much smaller than the matrix."""
    return (rows + columns) * min(rows, columns, rank) * min_compression_rate < rows * columns


@functools.lru_cache(maxsize=256)
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
        batches=tuple(batches),
        runs=_between(chosen, layout.numel),
        # One matrix for all holds its values where the bucket does, and their residuals go by parameter.
        sums=layout if whole else _sums(layout, batches),
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


def _sums(layout: BucketLayout, batches: list[Batch]) -> BucketLayout:
    slots = {slot.name: slot for slot in layout.slots}
    moved, offset = [], 0
    for matrix in (matrix for batch in batches for matrix in batch.matrices):
        moved.append(replace(slots[matrix.name], offset=offset))
        offset += matrix.numel
    return replace(layout, slots=tuple(moved))


def _factors(layout: BucketLayout, batches: list[Batch], length_of: Callable[[Matrix], int]) -> BucketLayout:
    slots, offset = [], 0
    for batch in batches:
        for matrix in batch.matrices:
            shape = torch.Size([batch.rank, length_of(matrix)])
            slots.append(Slot(matrix.name, offset, shape, (shape[1], 1)))
            offset += shape.numel()
    return replace(layout, slots=tuple(slots))


def _part(flat: Tensor, start: int, shape: tuple[int, int, int]) -> Tensor:
    return flat[start : start + math.prod(shape)].view(shape)
