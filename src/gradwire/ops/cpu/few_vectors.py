"""Products of a bucket's matrices with up to four vectors, in numba, at the speed of memory."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from gradwire.ops.cpu.compiling import kernel
from gradwire.ops.cpu.lines import F4, I4, I8
from gradwire.ops.cpu.scalars import INFINITY, larger

MAX_VECTORS = 4

_VECTOR, _MATRIX = F4[::1], F4[:, ::1]


@kernel((_VECTOR, _VECTOR))
def accumulate(values: Any, sums: Any) -> Any:
    """Add the finite values to ``sums``; return the bits of the largest magnitude."""
    largest = I4(0)
    for i in range(values.size):
        magnitude = larger(I4(0), values[i])
        largest = larger(largest, values[i])
        sums[i] += values[i] if magnitude < I4(INFINITY) else F4(0)
    return largest


@kernel((I4,))
def vote(largest: Any) -> Any:
    if largest >= I4(INFINITY):
        return F4(np.nan)
    return F4(largest > I4(0))


@kernel((_MATRIX, _MATRIX, _MATRIX, _MATRIX), reorders_sums=True)
def accumulate_and_project(values: Any, matrix: Any, basis: Any, out: Any) -> Any:
    n, m = matrix.shape
    last = basis.shape[0] - 1
    # Always four vectors for each load of the row; the last one stands in for missing ones.
    c1, c2, c3 = min(1, last), min(2, last), last
    b0, b1, b2, b3 = basis[0], basis[c1], basis[c2], basis[c3]
    largest = I4(0)
    for i in range(n):
        own, row = values[i], matrix[i]
        s0 = s1 = s2 = s3 = F4(0)
        for j in range(m):
            value = own[j]
            largest = larger(largest, value)
            total = row[j] + (value if larger(I4(0), value) < I4(INFINITY) else F4(0))
            row[j] = total
            s0 += total * b0[j]
            s1 += total * b1[j]
            s2 += total * b2[j]
            s3 += total * b3[j]
        out[c3, i], out[c2, i], out[c1, i], out[0, i] = s3, s2, s1, s0
    return vote(largest)


@kernel((_MATRIX, I8, I8, _MATRIX, _MATRIX), reorders_sums=True)
def _add_rows(matrix: Any, i: Any, step: Any, basis: Any, out: Any) -> None:
    """Add the products of four rows: row ``i`` and those 1, 2 and 3 times ``step`` after it."""
    k, l, h = i + step, i + 2 * step, i + 3 * step  # noqa: E741
    m0, m1, m2, m3 = matrix[i], matrix[k], matrix[l], matrix[h]
    r, m = out.shape
    full = r - r % 4
    for c in range(0, full, 4):
        # Four vectors share each load of the rows; four rows share each load and store of a sum.
        t0, t1, t2, t3 = out[c], out[c + 1], out[c + 2], out[c + 3]
        p0, p1, p2, p3 = basis[c], basis[c + 1], basis[c + 2], basis[c + 3]
        a0, a1, a2, a3 = p0[i], p0[k], p0[l], p0[h]
        b0, b1, b2, b3 = p1[i], p1[k], p1[l], p1[h]
        c0, c1, c2, c3 = p2[i], p2[k], p2[l], p2[h]
        d0, d1, d2, d3 = p3[i], p3[k], p3[l], p3[h]
        for j in range(m):
            x, y, z, w = m0[j], m1[j], m2[j], m3[j]
            t0[j] += (a0 * x + a1 * y) + (a2 * z + a3 * w)
            t1[j] += (b0 * x + b1 * y) + (b2 * z + b3 * w)
            t2[j] += (c0 * x + c1 * y) + (c2 * z + c3 * w)
            t3[j] += (d0 * x + d1 * y) + (d2 * z + d3 * w)
    for c in range(full, r):
        total, p = out[c], basis[c]
        e0, e1, e2, e3 = p[i], p[k], p[l], p[h]
        for j in range(m):
            total[j] += (e0 * m0[j] + e1 * m1[j]) + (e2 * m2[j] + e3 * m3[j])


@kernel((_MATRIX, _MATRIX, numba.boolean, _MATRIX, _MATRIX), reorders_sums=True)
def project_back(values: Any, matrix: Any, adds: Any, basis: Any, out: Any) -> Any:
    n, m = matrix.shape
    out[:] = 0
    # Rows a quarter of the matrix apart: the processor prefetches four streams faster than one (6.2 ms
    # against 8.8 ms for 18.9 M values).
    quarter = n // 4
    largest = I4(0)
    for i in range(quarter):
        if adds:
            for k in range(i, 4 * quarter, quarter):
                largest = max(largest, accumulate(values[k], matrix[k]))
        _add_rows(matrix, i, quarter, basis, out)
    for i in range(4 * quarter, n):
        if adds:
            largest = max(largest, accumulate(values[i], matrix[i]))
        for c in range(basis.shape[0]):
            for j in range(m):
                out[c, j] += basis[c, i] * matrix[i, j]
    return vote(largest)
