"""Products of a bucket's matrices with any number of vectors, in numba, in tiles.

Tiles that find their operands in the first cache take little more time than their multiplications must. So
what comes from further away is prefetched, in the order in which it lies in memory, and factors are copied to
adjacent, aligned lines. With 32 vectors and 18.9 M values, the three passes of a step took 14, 13 and 25 ms
on one core whose multiplications alone take 10.2, 10.2 and 20.5 ms.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.few_vectors import accumulate, vote
from gradwire.ops.cpu.lines import F4, I4, I8, LINE, load, point, store
from gradwire.ops.cpu.tiles import (
    ADD,
    PANEL,
    ROWS,
    SET,
    STREAM,
    SUBTRACT,
    Ahead,
    Gradients,
    Left,
    Product,
    Right,
    multiply,
    multiply_and_accumulate,
    no_prefetch,
)
from gradwire.ops.cpu.transposes import transpose
from gradwire.ops.cpu.vectors import LINE_BYTES, aligned, fence

_MATRIX = F4[:, ::1]
# Rows of a matrix that stay in the first two caches while they are multiplied with a factor.
_NUM_ROWS = 32
# Products in a partial sum: longer sums are less exact.
_DEPTH = 256


@helper
def _copy(source: Any, target: Any, length: Any) -> None:
    whole = length - length % LINE
    for j in range(0, whole, LINE):
        store(target, j, load(source, j))
    for j in range(whole, length):
        target[j] = source[j]


@helper
def _num_panels(length: Any) -> Any:
    return -(-length // PANEL)


@helper
def _panels(factor: Any) -> Any:
    """Return a copy of a factor in panels as wide as a tile: distant rows evict each other from the cache."""
    rank, m = factor.shape
    panels = aligned(_num_panels(m) * rank * PANEL, np.float32)
    for p in range(_num_panels(m)):
        width = min(PANEL, m - p * PANEL)
        for c in range(rank):
            _copy(point(factor, c * m + p * PANEL), point(panels, (p * rank + c) * PANEL), width)
    return panels


@helper
def _leave_panels(panels: Any, factor: Any) -> None:
    """Do the reverse of `_panels`."""
    rank, m = factor.shape
    for p in range(_num_panels(m)):
        width = min(PANEL, m - p * PANEL)
        for c in range(rank):
            _copy(point(panels, (p * rank + c) * PANEL), point(factor, c * m + p * PANEL), width)


@helper
def _ahead(matrix: Any, i: Any, rank: Any) -> Any:
    """Return the prefetch of as many rows from ``i`` on as a product works on meanwhile."""
    return Ahead(point(matrix, i * matrix.shape[1]), I8(min(LINE, PANEL * ROWS // rank)))


@kernel((_MATRIX, _MATRIX, _MATRIX, _MATRIX))
def accumulate_and_project(values: Any, matrix: Any, basis: Any, out: Any) -> Any:
    n, m = matrix.shape
    rank = basis.shape[0]
    width = -(-rank // LINE) * LINE
    columns, sums, tops = (
        aligned(m * width, np.float32),
        aligned(n * width, np.float32),
        np.zeros(ROWS, np.int32),
    )
    columns[:] = 0  # also what pads a row to whole lines
    transpose(point(basis, 0), m, (rank, m), point(columns, 0), width)
    largest = I4(0)
    for k in range(min(ROWS, n)):
        largest = max(largest, accumulate(values[k], matrix[k]))
    for i in range(0, n, ROWS):
        num_rows = min(ROWS, n - i)
        next_row = i + ROWS
        for j in range(0, m, _DEPTH):
            depth = min(_DEPTH, m - j)
            left = Left(point(matrix, i * m + j), m, I8(1))
            right = Right(point(columns, j * width), PANEL, width)
            product = Product(point(sums, i * width), PANEL, width, ADD if j else SET)
            if next_row + ROWS <= n:
                # The next rows, a part of them in each product.
                place = next_row * m + j * ROWS
                coming = Gradients(point(values, place), point(matrix, place), point(tops, 0))
                multiply_and_accumulate(width, depth, left, right, product, coming)
            else:
                multiply((num_rows, width), depth, left, right, product, no_prefetch(left.first))
        if next_row + ROWS > n:
            for k in range(next_row, n):
                largest = max(largest, accumulate(values[k], matrix[k]))
    # The array, not a pointer: numba frees an array after its last use.
    transpose(sums, width, (n, rank), point(out, 0), n)
    return vote(max(largest, tops.max()))


@kernel((_MATRIX, _MATRIX, numba.boolean, _MATRIX, _MATRIX))
def project_back(values: Any, matrix: Any, adds: Any, basis: Any, out: Any) -> Any:
    n, m = matrix.shape
    rank = basis.shape[0]
    panels = aligned(_num_panels(m) * rank * PANEL, np.float32)
    largest = I4(0)
    for i in range(0, n, _NUM_ROWS):
        num_rows = min(_NUM_ROWS, n - i)
        if adds:
            for k in range(i, i + num_rows):
                largest = max(largest, accumulate(values[k], matrix[k]))
        multiply(
            (rank, m),
            num_rows,
            Left(point(basis, i), n, I8(1)),
            Right(point(matrix, i * m), PANEL, m),
            Product(point(panels, 0), rank * PANEL, PANEL, ADD if i else SET),
            _ahead(matrix, i + _NUM_ROWS, rank),
        )
    _leave_panels(panels, out)
    return vote(largest)


@helper
def _multiply_panel(left: Any, right: Any, rank: Any, i: Any, out: Any, mode: Any, ahead: Any) -> None:
    """Multiply the panel of ``left`` that begins with row ``i`` with all of ``right``."""
    m = out.shape[1]
    multiply(
        (min(PANEL, out.shape[0] - i), m),
        rank,
        Left(point(left, i * rank), I8(1), PANEL),
        Right(point(right, 0), rank * PANEL, PANEL),
        Product(point(out, i * m), PANEL, m, mode),
        ahead,
    )


@helper
def _panels_of(factor: Any, known: Any, known_panels: Any) -> Any:
    return known_panels if factor.ctypes.data == known.ctypes.data else _panels(factor)


@kernel((_MATRIX, _MATRIX, _MATRIX, _MATRIX, _MATRIX, numba.boolean, _MATRIX, numba.boolean))
def finish(
    left: Any,
    right: Any,
    own_left: Any,
    own_right: Any,
    matrix: Any,
    has_sums: Any,
    values: Any,
    streams: Any,
) -> None:
    rank = left.shape[0]
    lefts, rights = _panels(left), _panels(right)
    own_lefts = _panels_of(own_left, left, lefts) if has_sums else lefts
    own_rights = _panels_of(own_right, right, rights) if has_sums else rights
    is_aligned = values.ctypes.data % LINE_BYTES == 0 and values.shape[1] % LINE == 0
    mode = STREAM if streams and is_aligned else SET
    for i in range(0, values.shape[0], PANEL):
        ahead = _ahead(matrix, i, rank)
        _multiply_panel(lefts, rights, rank, i, values, mode, ahead)
        if has_sums:
            _multiply_panel(own_lefts, own_rights, rank, i, matrix, SUBTRACT, no_prefetch(ahead.first))
    fence()
