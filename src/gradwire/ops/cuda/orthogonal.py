"""Orthonormalization in Triton: of all vectors at once if they differ enough, else one by one.

A program takes one matrix. One by one, r vectors take r (r - 1) sums over a whole vector, each after the
other: at rank 32 that is a thousand, and took longer than all else that low rank does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.cuda.codes import ABS, INFINITY
from gradwire.ops.reference.low_rank import NEGLIGIBLE

_NEGLIGIBLE = tl.constexpr(NEGLIGIBLE[torch.float32])
# Largest squared condition number of unit vectors that are made orthogonal at once. With it, rounding in fp32
# leaves products of 2^-8 at most after a first pass, and nothing but rounding after a second.
_MAX_CONDITION = tl.constexpr(2.0**14)
# Few vectors are fast one by one. Others are padded to a power of two, as far as shared memory holds them.
_FEW, _MANY = 4, 32
_COLUMNS = 128


@triton.jit
def _columns(vectors, start, num_vectors, length, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the places of some columns of all vectors, and a mask of those that exist."""
    row = tl.arange(0, RANK)[:, None]
    column = start + tl.arange(0, COLUMNS)[None, :]
    return vectors + row * length + column, (row < num_vectors) & (column < length)


@triton.jit
def _largest(vectors, num_vectors, length, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the largest magnitude of each vector, as bits."""
    largest = tl.zeros([RANK], tl.int32)
    for start in range(0, length, COLUMNS):
        places, exist = _columns(vectors, start, num_vectors, length, RANK, COLUMNS)
        found = tl.load(places, exist, other=0.0).to(tl.int32, bitcast=True) & ABS
        largest = tl.maximum(largest, tl.max(found, axis=1))
    return largest


@triton.jit
def _products(vectors, scales, num_vectors, length, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the products of all pairs of vectors, each times its scale; 1 for each that is padding."""
    products = tl.zeros([RANK, RANK], tl.float32)
    for start in range(0, length, COLUMNS):
        places, exist = _columns(vectors, start, num_vectors, length, RANK, COLUMNS)
        part = tl.load(places, exist, other=0.0) * scales[:, None]
        products += tl.dot(part, tl.trans(part), input_precision="ieee")
    row, column = tl.arange(0, RANK)[:, None], tl.arange(0, RANK)[None, :]
    return tl.where((row == column) & (row >= num_vectors), 1.0, products)


@triton.jit
def _invert_root(products, RANK: tl.constexpr):
    """Return the inverse of the Cholesky factor, and True if rounding does not spoil it."""
    row, column, place = tl.arange(0, RANK)[:, None], tl.arange(0, RANK)[None, :], tl.arange(0, RANK)
    lengths = tl.sum(tl.where(row == column, products, 0.0), axis=0)
    inverse = tl.where(row == column, 1.0, 0.0)
    condition = 0.0
    positive = RANK > 0
    for c in range(RANK):
        own = tl.sum(tl.where(row == c, products, 0.0), axis=0)
        pivot = tl.sum(tl.where(place == c, own, 0.0), axis=0)
        positive = positive & (pivot > 0.0)
        scale = 1.0 / tl.sqrt(tl.where(pivot > 0.0, pivot, 1.0))
        shares = tl.sum(tl.where(column == c, products, 0.0), axis=1)[:, None] * scale
        found = tl.sum(tl.where(row == c, inverse, 0.0), axis=0) * scale
        condition += tl.sum(found * found * lengths, axis=0)
        products = tl.where(row > c, products - shares * (own * scale)[None, :], products)
        inverse = tl.where(row > c, inverse - shares * found[None, :], inverse)
        inverse = tl.where(row == c, found[None, :], inverse)
    return inverse, positive & (condition < _MAX_CONDITION)


@triton.jit
def _combine(vectors, inverse, scales, num_vectors, length, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace the vectors, each times its scale, by their sums with the rows of ``inverse`` as factors."""
    for start in range(0, length, COLUMNS):
        places, exist = _columns(vectors, start, num_vectors, length, RANK, COLUMNS)
        part = tl.load(places, exist, other=0.0) * scales[:, None]
        tl.store(places, tl.dot(inverse, part, input_precision="ieee"), exist)


@triton.jit
def _at_once(vectors, num_vectors, length, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Orthogonalize by Cholesky QR, twice (Yamamoto et al., 2015), which gives what Gram-Schmidt gives.

    Return False, with nothing changed, if the vectors are too much alike, or not all finite.
    """
    largest = _largest(vectors, num_vectors, length, RANK, COLUMNS)
    is_finite = tl.max(largest, axis=0) < INFINITY
    top = largest.to(tl.float32, bitcast=True)
    scales = tl.where(is_finite, 1.0 / tl.where(top == 0.0, 1.0, top), 0.0)
    inverse, differ = _invert_root(_products(vectors, scales, num_vectors, length, RANK, COLUMNS), RANK)
    is_done = differ & is_finite
    if is_done:
        _combine(vectors, inverse, scales, num_vectors, length, RANK, COLUMNS)
        tl.debug_barrier()  # threads read what others wrote
        ones = tl.full([RANK], 1.0, tl.float32)
        inverse, _ = _invert_root(_products(vectors, ones, num_vectors, length, RANK, COLUMNS), RANK)
        tl.debug_barrier()
        _combine(vectors, inverse, ones, num_vectors, length, RANK, COLUMNS)
    return is_done


@triton.jit
def _direction(own, vectors, i, length, BLOCK: tl.constexpr):
    """Return the unit vector of what is orthogonal to the vectors before, and two flags.

    The first is True if that is not negligible, the second if ``own`` is finite.
    """
    place = tl.arange(0, BLOCK)
    finite = tl.max(own.to(tl.int32, bitcast=True) & ABS, axis=0) < INFINITY
    own = tl.where(finite, own, 0.0)
    top = tl.max(tl.abs(own), axis=0)
    rest = own / tl.where(top == 0.0, 1.0, top)
    whole = tl.sum(rest * rest, axis=0)
    for _ in range(2):
        for c in range(i):
            other = tl.load(vectors + c * length + place, place < length, other=0.0)
            rest -= tl.sum(rest * other, axis=0) * other
    remains = tl.sum(rest * rest, axis=0)
    keeps = finite & (remains > _NEGLIGIBLE * _NEGLIGIBLE * whole)
    return rest / tl.where(remains == 0.0, 1.0, tl.sqrt(remains)), keeps, finite


@triton.jit
def _one_by_one(vectors, spare, num_vectors, length, HAS_SPARE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    exists = place < length
    all_finite = length > 0
    for i in range(num_vectors):
        own = tl.load(vectors + i * length + place, exists, other=0.0)
        direction, keeps, finite = _direction(own, vectors, i, length, BLOCK)
        result = tl.where(keeps, direction, 0.0)
        if HAS_SPARE:
            if not keeps:
                own = tl.load(spare + i * length + place, exists, other=0.0)
                direction, keeps, finite = _direction(own, vectors, i, length, BLOCK)
                result = tl.where(keeps, direction, 0.0)
        else:
            all_finite = all_finite & finite
            result = tl.where(all_finite, result, float("nan"))
        tl.store(vectors + i * length + place, result, exists)
        tl.debug_barrier()  # the next vector's threads read what these wrote


@triton.jit
def _orthogonalize(
    matrices, factor, spare,
    HAS_SPARE: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    entry = matrices + 3 * tl.program_id(0)
    start, num_vectors, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    is_done = start < 0
    if RANK > 0:
        is_done = _at_once(factor + start, num_vectors, length, RANK, COLUMNS)
    if not is_done:
        _one_by_one(factor + start, spare + start, num_vectors, length, HAS_SPARE, BLOCK)


def orthogonalize_matrices(
    matrices: Tensor, factor: Tensor, spare: Tensor | None, rank: int, block: int
) -> None:
    """Orthogonalize as the reference does; ``matrices`` has a row with start, rank and length for each.

    No matrix has more than ``rank`` vectors, and no vector more than ``block`` values.
    """
    _orthogonalize[(len(matrices),)](
        matrices,
        factor,
        factor if spare is None else spare,
        HAS_SPARE=spare is not None,
        BLOCK=block,
        RANK=max(triton.next_power_of_2(rank), 16) if _FEW < rank <= _MANY else 0,
        COLUMNS=_COLUMNS,
        num_warps=min(block // 512, 16),
    )
