"""Orthonormalization in numba: of all vectors at once if they differ enough, else one by one."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.few_vectors import MAX_VECTORS
from gradwire.ops.cpu.lines import F4, I4, I8, LINE, point
from gradwire.ops.cpu.scalars import INFINITY, from_bits, larger
from gradwire.ops.cpu.tiles import ADD, PANEL64, ROWS, SET, Left, Product, Right, multiply64, no_prefetch
from gradwire.ops.cpu.transposes import transpose
from gradwire.ops.cpu.vectors import aligned
from gradwire.ops.reference.low_rank import MAX_CONDITION, NEGLIGIBLE

_VECTOR, _MATRIX = F4[::1], F4[:, ::1]
_F8 = numba.float64
_NEGLIGIBLE = NEGLIGIBLE[torch.float32]
# Columns that are worked on at a time, in fp64: 16 KiB for 32 vectors.
_NUM_COLUMNS = 64


@kernel((_F8[:, ::1], _F8[:, ::1]))
def _invert_root(products: Any, inverse: Any) -> Any:
    """Write the inverse of the Cholesky factor of ``products``; return False if it would not be exact.

    ``products`` is overwritten.
    """
    size = inverse.shape[0]
    inverse[:] = 0
    lengths = np.empty(size, np.float64)
    for c in range(size):
        lengths[c], inverse[c, c] = products[c, c], 1.0
    condition = 0.0
    for c in range(size):
        if not products[c, c] > 0.0:
            return False
        scale = 1.0 / np.sqrt(products[c, c])
        for k in range(c, size):
            products[c, k] *= scale
        for k in range(c + 1):
            inverse[c, k] *= scale
            condition += inverse[c, k] * inverse[c, k] * lengths[k]
        for d in range(c + 1, size):
            share = products[c, d]
            for k in range(d, size):
                products[d, k] -= share * products[c, k]
            for k in range(c + 1):
                inverse[d, k] -= share * inverse[c, k]
    return condition <= MAX_CONDITION


@helper
def _widen(vectors: Any, start: Any, num_columns: Any, part: Any) -> None:
    for c in range(vectors.shape[0]):
        row, to = point(vectors, c * vectors.shape[1] + start), part[c]
        for k in range(num_columns):
            to[k] = row[k]


@kernel((_MATRIX,))
def _orthogonalize_at_once(vectors: Any) -> Any:
    """Orthogonalize by Cholesky QR (Stathopoulos and Wu, 2002), which gives what Gram-Schmidt gives.

    Return False, with nothing changed, if the vectors are too much alike.
    """
    rank, length = vectors.shape
    width = -(-rank // LINE) * LINE
    part = aligned(rank * _NUM_COLUMNS, np.float64).reshape(rank, _NUM_COLUMNS)
    found = aligned(rank * _NUM_COLUMNS, np.float64).reshape(rank, _NUM_COLUMNS)
    transposed, wide = aligned(_NUM_COLUMNS * width, np.float32), aligned(_NUM_COLUMNS * width, np.float64)
    transposed[:] = 0
    products = aligned(rank * width, np.float64).reshape(rank, width)
    products[:] = 0
    for j in range(0, length, _NUM_COLUMNS):
        num_columns = min(_NUM_COLUMNS, length - j)
        _widen(vectors, j, num_columns, part)
        transpose(point(vectors, j), length, (rank, num_columns), point(transposed, 0), width)
        for k in range(num_columns * width):
            wide[k] = transposed[k]
        for c in range(0, rank, ROWS):
            # Products with earlier vectors are not needed: those of a pair are the same.
            start = c // PANEL64 * PANEL64
            first = point(part, c * _NUM_COLUMNS)
            multiply64(
                (min(ROWS, rank - c), width - start),
                num_columns,
                Left(first, I8(_NUM_COLUMNS), I8(1)),
                Right(point(wide, start), PANEL64, width),
                Product(point(products, c * width + start), PANEL64, width, ADD),
                no_prefetch(first),
            )
    inverse = np.empty((rank, rank), np.float64)
    if not _invert_root(products, inverse):
        return False
    for j in range(0, length, _NUM_COLUMNS):
        num_columns = min(_NUM_COLUMNS, length - j)
        _widen(vectors, j, num_columns, part)
        first = point(part, 0)
        for c in range(0, rank, ROWS):
            # A result is a sum of the vectors up to its own.
            multiply64(
                (min(ROWS, rank - c), num_columns),
                min(c + ROWS, rank),
                Left(point(inverse, c * rank), rank, I8(1)),
                Right(first, PANEL64, I8(_NUM_COLUMNS)),
                Product(point(found, c * _NUM_COLUMNS), PANEL64, I8(_NUM_COLUMNS), SET),
                no_prefetch(first),
            )
        for c in range(rank):
            row, to = found[c], point(vectors, c * length + j)
            for k in range(num_columns):
                to[k] = row[k]
    return True


@helper
def _product(a: Any, b: Any) -> Any:
    """Return the sum of products in fp64: in 16 parts, so that its bits are the same on every processor."""
    parts = np.zeros(LINE, np.float64)
    whole = a.size - a.size % LINE
    for j in range(0, whole, LINE):
        for k in range(LINE):
            parts[k] += a[j + k] * _F8(b[j + k])
    for j in range(whole, a.size):
        parts[j - whole] += a[j] * _F8(b[j])
    total = 0.0
    for k in range(LINE):
        total += parts[k]
    return total


@kernel((_VECTOR, _F8[::1], _MATRIX, I8))
def _direction(own: Any, rest: Any, vectors: Any, num_before: Any) -> Any:
    """Write the unit vector of what is orthogonal to the vectors before to ``rest``.

    Return False if that is negligible.
    """
    top = I4(0)
    for j in range(own.size):
        top = larger(top, own[j])
    if top >= I4(INFINITY) or top == I4(0):
        return False
    scale = 1.0 / _F8(from_bits(top))
    for j in range(own.size):
        rest[j] = _F8(own[j]) * scale
    whole = _product(rest, rest)
    for _ in range(2):
        for c in range(num_before):
            share = _product(rest, vectors[c])
            for j in range(own.size):
                rest[j] -= share * _F8(vectors[c, j])
    length = _product(rest, rest)
    if not length > _NEGLIGIBLE * _NEGLIGIBLE * whole:
        return False
    scale = 1.0 / np.sqrt(length)
    for j in range(own.size):
        rest[j] *= scale
    return True


@kernel((_MATRIX, _MATRIX, numba.boolean))
def orthogonalize(vectors: Any, spare: Any, has_spare: Any) -> None:
    if vectors.shape[0] > MAX_VECTORS and _orthogonalize_at_once(vectors):
        return
    rest = np.empty(vectors.shape[1], np.float64)
    poisoned = False
    for i in range(vectors.shape[0]):
        own = vectors[i]
        if not has_spare:
            for j in range(own.size):
                poisoned |= larger(I4(0), own[j]) >= I4(INFINITY)
        if poisoned:
            own[:] = np.nan
        elif _direction(own, rest, vectors, i) or (has_spare and _direction(spare[i], rest, vectors, i)):
            for j in range(own.size):
                own[j] = rest[j]
        else:
            own[:] = 0
