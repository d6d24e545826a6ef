"""Products of a bucket's matrices with any number of vectors, in numba, in tiles.

While a block of rows is multiplied, the next is prefetched. With 32 vectors and 18.9 M values, the three
passes of a step took 23, 16 and 31 to 36 ms on one core; plain loops took 51, 110 and 93 ms.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.few_vectors import accumulate, vote
from gradwire.ops.cpu.lines import F4, I4, I8, LINE, point
from gradwire.ops.cpu.tiles import (
    ADD,
    PANEL,
    ROWS,
    SET,
    SUBTRACT,
    Ahead,
    Left,
    Product,
    Right,
    multiply,
    no_prefetch,
)

_MATRIX = F4[:, ::1]
# Rows of a matrix that stay in the first two caches while they are multiplied with a factor.
_NUM_ROWS = 32
# Fewer where gradients are added to them first.
_NUM_SUMMED = ROWS
# Products in a partial sum: longer sums are less exact.
_DEPTH = 256


@kernel((_MATRIX, _MATRIX, _MATRIX, _MATRIX))
def accumulate_and_project(values: Any, matrix: Any, basis: Any, out: Any) -> Any:
    n, m = matrix.shape
    rank = basis.shape[0]
    # Padded with zeros to a whole line.
    width = -(-rank // LINE) * LINE
    transposed, sums = np.zeros((m, width), np.float32), np.empty((_NUM_SUMMED, width), np.float32)
    for c in range(rank):
        for j in range(m):
            transposed[j, c] = basis[c, j]
    largest = I4(0)
    for i in range(0, n, _NUM_SUMMED):
        num_rows = min(_NUM_SUMMED, n - i)
        for k in range(i, i + num_rows):
            largest = max(largest, accumulate(values[k], matrix[k]))
        sums[:] = 0
        for j in range(0, m, _DEPTH):
            # Each step prefetches a line of the next rows: of values and of sums in turns.
            coming = values if j // _DEPTH % 2 == 0 else matrix
            ahead = point(coming, (i + _NUM_SUMMED) * m + j // (2 * _DEPTH) * (2 * _DEPTH) * ROWS)
            multiply(
                (num_rows, width),
                min(_DEPTH, m - j),
                Left(point(matrix, i * m + j), m, I8(1)),
                Right(point(transposed, j * width), PANEL, width),
                Product(point(sums, 0), width, ADD),
                Ahead(ahead, m, I8(0), I8(LINE)),
            )
        for c in range(rank):
            for k in range(num_rows):
                out[c, i + k] = sums[k, c]
    return vote(largest)


@kernel((_MATRIX, _MATRIX, numba.boolean, _MATRIX, _MATRIX))
def project_back(values: Any, matrix: Any, adds: Any, basis: Any, out: Any) -> Any:
    n, m = matrix.shape
    out[:] = 0
    largest = I4(0)
    for i in range(0, n, _NUM_ROWS):
        num_rows = min(_NUM_ROWS, n - i)
        if adds:
            for k in range(i, i + num_rows):
                largest = max(largest, accumulate(values[k], matrix[k]))
        multiply(
            (basis.shape[0], m),
            num_rows,
            Left(point(basis, i), n, I8(1)),
            Right(point(matrix, i * m), PANEL, m),
            Product(point(out, 0), m, ADD),
            # Each tile of vectors prefetches another line of the next rows.
            Ahead(point(matrix, (i + _NUM_ROWS) * m), I8(LINE // ROWS), I8(1), m),
        )
    return vote(largest)


@helper
def _panels(factor: Any) -> Any:
    """Return a copy of a factor in panels as wide as a tile: distant rows evict each other from the cache."""
    rank, m = factor.shape
    panels = np.empty((-(-m // PANEL), rank, PANEL), np.float32)
    for p in range(panels.shape[0]):
        for c in range(rank):
            for j in range(min(PANEL, m - p * PANEL)):
                panels[p, c, j] = factor[c, p * PANEL + j]
    return panels


@helper
def _multiply_block(left: Any, i: Any, block: Any, panels: Any, out: Any, mode: Any) -> None:
    rank = left.shape[0]
    num_rows = min(_NUM_ROWS, out.shape[0] - i)
    for c in range(rank):
        for k in range(num_rows):
            block[c, k] = left[c, i + k]
    first = point(panels, 0)
    multiply(
        (num_rows, out.shape[1]),
        rank,
        Left(point(block, 0), I8(1), I8(_NUM_ROWS)),
        Right(first, rank * PANEL, PANEL),
        Product(point(out, i * out.shape[1]), out.shape[1], mode),
        no_prefetch(first),
    )


@kernel((_MATRIX, _MATRIX, _MATRIX, _MATRIX, _MATRIX, numba.boolean, _MATRIX))
def finish(
    left: Any, right: Any, own_left: Any, own_right: Any, matrix: Any, has_sums: Any, values: Any
) -> None:
    block = np.empty((left.shape[0], _NUM_ROWS), np.float32)
    means = _panels(right)
    owns = _panels(own_right) if has_sums else means
    for i in range(0, values.shape[0], _NUM_ROWS):
        _multiply_block(left, i, block, means, values, SET)
        if has_sums:
            _multiply_block(own_left, i, block, owns, matrix, SUBTRACT)
