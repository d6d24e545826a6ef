"""Orthonormalization in Triton: of all vectors at once if they differ enough, else one by one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.cuda.cholesky import orthogonalize_at_once
from gradwire.ops.cuda.codes import ABS, INFINITY
from gradwire.ops.reference.low_rank import NEGLIGIBLE

_NEGLIGIBLE = tl.constexpr(NEGLIGIBLE[torch.float32])
# Few vectors are fast one by one. The root of the products of many does not fit into registers.
_FEW, _MANY = 4, 32


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
def _orthogonalize(
    matrices, factor, spare, is_done, HAS_SPARE: tl.constexpr, MAY_BE_DONE: tl.constexpr, BLOCK: tl.constexpr
):
    entry = matrices + 3 * tl.program_id(0)
    start, num_vectors, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    vectors = factor + start
    place = tl.arange(0, BLOCK)
    exists = place < length
    all_finite = length > 0
    if MAY_BE_DONE:
        num_vectors = tl.where(tl.load(is_done + tl.program_id(0)) != 0, 0, num_vectors)
    for i in range(num_vectors):
        own = tl.load(vectors + i * length + place, exists, other=0.0)
        direction, keeps, finite = _direction(own, vectors, i, length, BLOCK)
        result = tl.where(keeps, direction, 0.0)
        if HAS_SPARE:
            if not keeps:
                own = tl.load(spare + start + i * length + place, exists, other=0.0)
                direction, keeps, finite = _direction(own, vectors, i, length, BLOCK)
                result = tl.where(keeps, direction, 0.0)
        else:
            all_finite = all_finite & finite
            result = tl.where(all_finite, result, float("nan"))
        tl.store(vectors + i * length + place, result, exists)
        tl.debug_barrier()  # the next vector's threads read what these wrote


def orthogonalize_matrices(
    matrices: Tensor, factor: Tensor, spare: Tensor | None, rank: int, block: int
) -> None:
    """Orthogonalize as the reference does; ``matrices`` has a row with start, rank and length for each.

    No matrix has more than ``rank`` vectors, and no vector more than ``block`` values.
    """
    may_be_done = _FEW < rank <= _MANY
    _orthogonalize[(len(matrices),)](
        matrices,
        factor,
        factor if spare is None else spare,
        orthogonalize_at_once(matrices, factor, rank, block) if may_be_done else matrices,
        HAS_SPARE=spare is not None,
        MAY_BE_DONE=may_be_done,
        BLOCK=block,
        num_warps=min(block // 512, 16),
        enable_fp_fusion=True,  # Triton's own default changes, and ranks may have different versions
    )
