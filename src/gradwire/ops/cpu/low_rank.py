"""Low-rank factors in numba, for fp32 matrices in host memory; one matrix at a time, one thread, no GIL.

A result depends on its own matrix alone, not on what shares its batch, so it is the same in every bucket.
Importing this module compiles the kernels (6 s), or reads them from numba's cache on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gradwire.ops.cpu.compiling import kernel
from gradwire.ops.cpu.scalars import F4, I4, from_bits, larger
from gradwire.ops.reference.low_rank import NEGLIGIBLE

_INFINITY = 0x7F800000
_MATRIX = F4[:, ::1]
_F8 = numba.float64
_NEGLIGIBLE = NEGLIGIBLE[torch.float32]


@kernel((F4[::1], F4[::1]))
def _accumulate(values: Any, sums: Any) -> Any:
    largest = I4(0)
    for i in range(values.size):
        magnitude = larger(I4(0), values[i])
        largest = larger(largest, values[i])
        sums[i] += values[i] if magnitude < I4(_INFINITY) else F4(0)
    return largest


@kernel((_MATRIX, _MATRIX, _MATRIX, numba.boolean, _MATRIX), reorders_sums=True)
def _project(matrix: Any, basis: Any, out: Any, adds: Any, values: Any) -> Any:
    """The largest magnitude of the values that are added to the matrix first, row by row, if they are."""
    n, m = matrix.shape
    last = basis.shape[0] - 1
    largest = I4(0)
    for i in range(n):
        row = matrix[i]
        if adds:
            largest = max(largest, _accumulate(values[i], row))
        # Four vectors for each load of the row; the last ones stand in for those there are not.
        for c in range(0, last + 1, 4):
            c1, c2, c3 = min(c + 1, last), min(c + 2, last), min(c + 3, last)
            b0, b1, b2, b3 = basis[c], basis[c1], basis[c2], basis[c3]
            s0 = s1 = s2 = s3 = F4(0)
            for j in range(m):
                s0 += row[j] * b0[j]
                s1 += row[j] * b1[j]
                s2 += row[j] * b2[j]
                s3 += row[j] * b3[j]
            out[c3, i], out[c2, i], out[c1, i], out[c, i] = s3, s2, s1, s0
    return from_bits(largest)


@kernel((_MATRIX, _MATRIX, _MATRIX), reorders_sums=True)
def _project_back(matrix: Any, basis: Any, out: Any) -> None:
    n, m = matrix.shape
    out[:] = 0
    full = n - n % 4
    # Four rows for each load and store of a sum.
    for i in range(0, full, 4):
        m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
        for c in range(basis.shape[0]):
            p0, p1, p2, p3 = basis[c, i], basis[c, i + 1], basis[c, i + 2], basis[c, i + 3]
            total = out[c]
            for j in range(m):
                total[j] += (p0 * m0[j] + p1 * m1[j]) + (p2 * m2[j] + p3 * m3[j])
    for i in range(full, n):
        for c in range(basis.shape[0]):
            for j in range(m):
                out[c, j] += basis[c, i] * matrix[i, j]


@kernel((_MATRIX, _MATRIX, F4, numba.boolean, _MATRIX), reorders_sums=True)
def _add_product(left: Any, right: Any, sign: Any, adds: Any, out: Any) -> None:
    n, m = out.shape
    last = left.shape[0] - 1
    for i in range(n):
        row = out[i]
        for c in range(0, last + 1, 4):
            c1, c2, c3 = min(c + 1, last), min(c + 2, last), min(c + 3, last)
            q0, q1, q2, q3 = right[c], right[c1], right[c2], right[c3]
            p0 = sign * left[c, i]
            p1 = sign * left[c1, i] if c + 1 <= last else F4(0)
            p2 = sign * left[c2, i] if c + 2 <= last else F4(0)
            p3 = sign * left[c3, i] if c + 3 <= last else F4(0)
            if adds or c > 0:
                for j in range(m):
                    row[j] += (p0 * q0[j] + p1 * q1[j]) + (p2 * q2[j] + p3 * q3[j])
            else:
                for j in range(m):
                    row[j] = (p0 * q0[j] + p1 * q1[j]) + (p2 * q2[j] + p3 * q3[j])


@kernel((F4[::1], _F8[::1], _MATRIX, numba.int64), reorders_sums=True)
def _direction(own: Any, rest: Any, vectors: Any, num_before: Any) -> Any:
    """Leave in ``rest`` what is orthogonal to the vectors before, of length one; False if that is nothing."""
    top = I4(0)
    for j in range(own.size):
        top = larger(top, own[j])
    if top >= I4(_INFINITY) or top == I4(0):
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
def _orthogonalize(vectors: Any, spare: Any, has_spare: Any) -> None:
    rest = np.empty(vectors.shape[1], np.float64)
    poisoned = False
    for i in range(vectors.shape[0]):
        own = vectors[i]
        if not has_spare:
            for j in range(own.size):
                poisoned |= larger(I4(0), own[j]) >= I4(_INFINITY)
        if poisoned:
            own[:] = np.nan
        elif _direction(own, rest, vectors, i) or (has_spare and _direction(spare[i], rest, vectors, i)):
            for j in range(own.size):
                own[j] = rest[j]
        else:
            own[:] = 0


def accumulate(values: Sequence[Tensor], sums: Sequence[Tensor], largest: Tensor) -> None:
    found = [
        _accumulate(value.view(-1).numpy(), total.view(-1).numpy())
        for value, total in zip(values, sums, strict=True)
    ]
    largest.copy_(torch.tensor(found, dtype=torch.int32).view(torch.float32))
    _take_out(values, largest)


def accumulate_and_project(
    values: Sequence[Tensor], matrices: Tensor, largest: Tensor, basis: Tensor, out: Tensor
) -> None:
    arrays = zip(values, matrices.numpy(), basis.numpy(), out.numpy(), strict=True)
    largest.copy_(torch.tensor([_project(total, q, p, True, value.numpy()) for value, total, q, p in arrays]))
    _take_out(values, largest)


def _take_out(values: Sequence[Tensor], largest: Tensor) -> None:
    """Set to zero what is not finite."""
    if not bool(largest.isfinite().all()):
        for value in values:
            value.nan_to_num_(0.0, 0.0, 0.0)


def project(matrices: Tensor, basis: Tensor, out: Tensor) -> None:
    for matrix, q, p in zip(matrices.numpy(), basis.numpy(), out.numpy(), strict=True):
        _project(matrix, q, p, False, matrix)


def project_back(matrices: Tensor, basis: Tensor, out: Tensor) -> None:
    _each(_project_back, matrices, basis, out)


def subtract(matrices: Tensor, left: Tensor, right: Tensor) -> None:
    for matrix, p, q in zip(matrices.numpy(), left.numpy(), right.numpy(), strict=True):
        _add_product(p, q, -1.0, True, matrix)


def multiply(left: Tensor, right: Tensor, out: Sequence[Tensor]) -> None:
    for values, p, q in zip(out, left.numpy(), right.numpy(), strict=True):
        _add_product(p, q, 1.0, False, values.numpy())


def orthogonalize(vectors: Tensor, spare: Tensor | None) -> None:
    others = vectors if spare is None else spare
    for own, other in zip(vectors.numpy(), others.numpy(), strict=True):
        _orthogonalize(own, other, spare is not None)


def _each(function: Any, *batches: Tensor) -> None:
    for arrays in zip(*(batch.numpy() for batch in batches), strict=True):
        function(*arrays)
