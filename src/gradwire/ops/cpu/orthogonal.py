"""Orthonormal vectors, in numba: all at once where they differ enough, else one after the other."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.few_vectors import MOST
from gradwire.ops.cpu.lines import F4, I4, I8, LINE, point
from gradwire.ops.cpu.scalars import INFINITY, from_bits, larger
from gradwire.ops.cpu.tiles import ADD, NOWHERE, PANEL64, ROWS, SET, multiply64
from gradwire.ops.reference.low_rank import NEGLIGIBLE

_VECTOR, _MATRIX = F4[::1], F4[:, ::1]
_F8 = numba.float64
_NEGLIGIBLE = NEGLIGIBLE[torch.float32]
# The squared condition of vectors of length one that are taken at once: rounding in fp64 leaves about as much
# of them in one another as rounding the result to fp32 does.
_MOST_ALIKE = 2.0**26
# How many places of the vectors are taken at a time, as fp64: 16 KiB of 32 vectors.
_NUM_PLACES = 64


@kernel((_F8[:, ::1], _F8[:, ::1]))
def _invert_root(products: Any, inverse: Any) -> Any:
    """The inverse of the Cholesky root of ``products``, which is used up; False if that is not exact."""
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
    return condition <= _MOST_ALIKE


@helper
def _widen(vectors: Any, start: Any, num_places: Any, part: Any) -> None:
    for c in range(vectors.shape[0]):
        row, to = point(vectors, c * vectors.shape[1] + start), part[c]
        for k in range(num_places):
            to[k] = row[k]


@kernel((_MATRIX,))
def _orthogonalize_at_once(vectors: Any) -> Any:
    """Cholesky QR (Stathopoulos and Wu, 2002), which is what Gram-Schmidt gives; else False, nothing done."""
    rank, length = vectors.shape
    width = -(-rank // LINE) * LINE
    part = np.empty((rank, _NUM_PLACES), np.float64)
    found = np.empty((rank, _NUM_PLACES), np.float64)
    turned = np.zeros((_NUM_PLACES, width), np.float64)
    products = np.zeros((rank, width), np.float64)
    for j in range(0, length, _NUM_PLACES):
        num_places = min(_NUM_PLACES, length - j)
        _widen(vectors, j, num_places, part)
        for c in range(rank):
            column = point(turned, c)
            for k in range(num_places):
                column[k * width] = part[c, k]
        first = point(part, 0)
        multiply64(
            (rank, width),
            num_places,
            first,
            (I8(_NUM_PLACES), I8(1)),
            point(turned, 0),
            (PANEL64, width),
            point(products, 0),
            width,
            ADD,
            first,
            NOWHERE,
        )
    inverse = np.empty((rank, rank), np.float64)
    if not _invert_root(products, inverse):
        return False
    for j in range(0, length, _NUM_PLACES):
        num_places = min(_NUM_PLACES, length - j)
        _widen(vectors, j, num_places, part)
        first = point(part, 0)
        for c in range(0, rank, ROWS):
            # A vector is made of those before it.
            multiply64(
                (min(ROWS, rank - c), num_places),
                min(c + ROWS, rank),
                point(inverse, c * rank),
                (rank, I8(1)),
                first,
                (PANEL64, I8(_NUM_PLACES)),
                point(found, c * _NUM_PLACES),
                I8(_NUM_PLACES),
                SET,
                first,
                NOWHERE,
            )
        for c in range(rank):
            row, to = found[c], point(vectors, c * length + j)
            for k in range(num_places):
                to[k] = row[k]
    return True


@kernel((_VECTOR, _F8[::1], _MATRIX, I8), reorders_sums=True)
def _direction(own: Any, rest: Any, vectors: Any, num_before: Any) -> Any:
    """Leave in ``rest`` what is orthogonal to the vectors before, of length one; False if that is nothing."""
    top = I4(0)
    for j in range(own.size):
        top = larger(top, own[j])
    if top >= I4(INFINITY) or top == I4(0):
        return False
    scale = 1.0 / _F8(from_bits(top))
    whole = 0.0
    for j in range(own.size):
        rest[j] = _F8(own[j]) * scale
        whole += rest[j] * rest[j]
    for _ in range(2):
        for c in range(num_before):
            share = 0.0
            for j in range(own.size):
                share += rest[j] * _F8(vectors[c, j])
            for j in range(own.size):
                rest[j] -= share * _F8(vectors[c, j])
    length = 0.0
    for j in range(own.size):
        length += rest[j] * rest[j]
    if not length > _NEGLIGIBLE * _NEGLIGIBLE * whole:
        return False
    scale = 1.0 / np.sqrt(length)
    for j in range(own.size):
        rest[j] *= scale
    return True


@kernel((_MATRIX, _MATRIX, numba.boolean))
def orthogonalize(vectors: Any, spare: Any, has_spare: Any) -> None:
    if vectors.shape[0] > MOST and _orthogonalize_at_once(vectors):
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
