"""Places of a bucket's matrices, their sums and their low-rank factors in flat memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Side = Literal["left", "right"]

OTHER: dict[Side, Side] = {"left": "right", "right": "left"}


@dataclass(frozen=True)
class Matrix:
    """A run of a bucket's values, read as a row-major matrix."""

    name: str
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape, and the places of their sums and factors, one matrix after the other.

    Methods take a flat tensor or numpy array and return views of it.
    """

    matrices: tuple[Matrix, ...]
    rank: int
    first: int
    """Number of matrices in the batches before this one."""
    sums_start: int
    left_start: int
    right_start: int

    @property
    def rows(self) -> int:
        return self.matrices[0].rows

    @property
    def columns(self) -> int:
        return self.matrices[0].columns

    def values(self, flat: Any) -> list[Any]:
        """Return each matrix of a bucket, (rows, columns)."""
        return [_part(flat, matrix.start, (self.rows, self.columns)) for matrix in self.matrices]

    def sums(self, flat: Any) -> Any:
        """Return the sums, (k, rows, columns)."""
        return _part(flat, self.sums_start, (len(self.matrices), self.rows, self.columns))

    def factors(self, side: Side, flat: Any) -> Any:
        """Return the factors: (k, rank, rows) on the left, (k, rank, columns) on the right."""
        shape = len(self.matrices), self.rank, self.length(side)
        return _part(flat, self.left_start if side == "left" else self.right_start, shape)

    def length(self, side: Side) -> int:
        """Return the length of a factor's vectors."""
        return self.rows if side == "left" else self.columns

    def each(self, flat: Any) -> Any:
        """Return this batch's part, (k,), of a tensor with one value per matrix of the bucket."""
        return flat[self.first : self.first + len(self.matrices)]


@dataclass(frozen=True, eq=False)  # compared by identity: each plan makes one object
class Batches:
    """All matrices of a bucket."""

    batches: tuple[Batch, ...]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __bool__(self) -> bool:
        return bool(self.batches)

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for batch in self.batches for matrix in batch.matrices]


def _part(flat: Any, start: int, shape: tuple[int, ...]) -> Any:
    return flat[start : start + math.prod(shape)].reshape(shape)
