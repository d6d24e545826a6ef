"""Where the matrices of a bucket lie that travel as thin factors: values, sums and factors, all flat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Side = Literal["left", "right"]

OTHER: dict[Side, Side] = {"left": "right", "right": "left"}


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


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape, and where each of their states begins, one matrix after the other.

    ``flat`` is a tensor or an array of numpy's, and what is returned are views of it.
    """

    matrices: tuple[Matrix, ...]
    rank: int
    first: int
    """How many matrices stand in batches before."""
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
        """Each matrix in a bucket, (rows, columns)."""
        return [_part(flat, matrix.start, (self.rows, self.columns)) for matrix in self.matrices]

    def sums(self, flat: Any) -> Any:
        """(k, rows, columns)."""
        return _part(flat, self.sums_start, (len(self.matrices), self.rows, self.columns))

    def factors(self, side: Side, flat: Any) -> Any:
        """(k, rank, rows) on the left, (k, rank, columns) on the right."""
        shape = len(self.matrices), self.rank, self.length(side)
        return _part(flat, self.left_start if side == "left" else self.right_start, shape)

    def length(self, side: Side) -> int:
        """Of the vectors of a factor."""
        return self.rows if side == "left" else self.columns

    def each(self, flat: Any) -> Any:
        """One value for each matrix, (k,), of those for all matrices of the bucket."""
        return flat[self.first : self.first + len(self.matrices)]


@dataclass(frozen=True, eq=False)  # one object for each plan, not compared field by field
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
