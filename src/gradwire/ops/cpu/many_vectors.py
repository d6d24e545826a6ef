"""A bucket's matrices and any number of vectors, in numba, as products in tiles.

While a block of rows is multiplied, the next is fetched. With 32 vectors and 18.9 M values, the three
passes of a step took 23, 16 and 31 to 36 ms on one core, where plain loops took 51, 110 and 93.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.few_vectors import accumulate, vote
from gradwire.ops.cpu.lines import F4, I4, I8, LINE, point
from gradwire.ops.cpu.tiles import ADD, NOWHERE, PANEL, ROWS, SET, TAKE, multiply

_MATRIX = F4[:, ::1]
# Rows of a matrix that stay in the first two caches while a factor goes by.
_NUM_ROWS = 32
# So few where their sums are taken, too.
_NUM_SUMMED = ROWS
# How many products are added up before they go to the others: longer sums are less exact.
_DEPTH = 256


@kernel((_MATRIX, _MATRIX, _MATRIX, _MATRIX))
def accumulate_and_project(values: Any, matrix: Any, basis: Any, out: Any) -> Any:
    n, m = matrix.shape
    rank = basis.shape[0]
    # Vectors that there are not, up to a whole line, are zero.
    width = -(-rank // LINE) * LINE
    turned, sums = np.zeros((m, width), np.float32), np.empty((_NUM_SUMMED, width), np.float32)
    for c in range(rank):
        for j in range(m):
            turned[j, c] = basis[c, j]
    largest = I4(0)
    for i in range(0, n, _NUM_SUMMED):
        num_rows = min(_NUM_SUMMED, n - i)
        for k in range(i, i + num_rows):
            largest = max(largest, accumulate(values[k], matrix[k]))
        sums[:] = 0
        for j in range(0, m, _DEPTH):
            # A line of the next rows for each step, of values and sums by turns.
            coming = values if j // _DEPTH % 2 == 0 else matrix
            ahead = point(coming, (i + _NUM_SUMMED) * m + j // (2 * _DEPTH) * (2 * _DEPTH) * ROWS)
            multiply(
                (num_rows, width),
                min(_DEPTH, m - j),
                point(matrix, i * m + j),
                (m, I8(1)),
                point(turned, j * width),
                (PANEL, width),
                point(sums, 0),
                width,
                ADD,
                ahead,
                (m, I8(0), I8(LINE)),
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
            point(basis, i),
            (n, I8(1)),
            point(matrix, i * m),
            (PANEL, m),
            point(out, 0),
            m,
            ADD,
            # Each tile of vectors another line of the next rows.
            point(matrix, (i + _NUM_ROWS) * m),
            (I8(LINE // ROWS), I8(1), m),
        )
    return vote(largest)


@helper
def _panels(factor: Any) -> Any:
    """A factor in pieces as wide as a tile: rows that lie far apart push each other out of the cache."""
    rank, m = factor.shape
    panels = np.empty((-(-m // PANEL), rank, PANEL), np.float32)
    for p in range(panels.shape[0]):
        for c in range(rank):
            for j in range(min(PANEL, m - p * PANEL)):
                panels[p, c, j] = factor[c, p * PANEL + j]
    return panels


@helper
def _multiply_block(left: Any, i: Any, block: Any, panels: Any, out: Any, how: Any) -> None:
    rank = left.shape[0]
    num_rows = min(_NUM_ROWS, out.shape[0] - i)
    for c in range(rank):
        for k in range(num_rows):
            block[c, k] = left[c, i + k]
    first = point(panels, 0)
    multiply(
        (num_rows, out.shape[1]),
        rank,
        point(block, 0),
        (I8(1), I8(_NUM_ROWS)),
        first,
        (rank * PANEL, PANEL),
        point(out, i * out.shape[1]),
        out.shape[1],
        how,
        first,
        NOWHERE,
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
            _multiply_block(own_left, i, block, owns, matrix, TAKE)
