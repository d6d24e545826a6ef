"""Low-rank factors for matrices in CUDA memory: torch's batched products, and Gram-Schmidt in Triton.

Op by op, the vectors of a matrix would take some twenty launches each; here a program takes a matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.reference import low_rank as reference
from gradwire.ops.reference.low_rank import (
    accumulate,
    accumulate_and_project,
    multiply,
    project,
    project_back,
    subtract,
)

__all__ = [
    "accumulate",
    "accumulate_and_project",
    "multiply",
    "orthogonalize",
    "project",
    "project_back",
    "subtract",
]

_NEGLIGIBLE = tl.constexpr(reference.NEGLIGIBLE[torch.float32])
_INFINITY = tl.constexpr(0x7F800000)
_ABS = tl.constexpr(0x7FFFFFFF)
# A vector that is longer does not fit into a program's registers.
_MAX_LENGTH = 1 << 16


@triton.jit
def _direction(own, vectors, i, length, BLOCK: tl.constexpr):
    """The part of unit length that is orthogonal to the vectors before, whether it is one, and is finite."""
    place = tl.arange(0, BLOCK)
    finite = tl.max(own.to(tl.int32, bitcast=True) & _ABS, axis=0) < _INFINITY
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


@triton.jit(do_not_specialize=["num_vectors", "length"])
def _orthogonalize(vectors, spare, num_vectors, length, HAS_SPARE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * num_vectors * length
    vectors += start
    spare += start
    all_finite = length > 0
    for i in range(num_vectors):
        exists = place < length
        own = tl.load(vectors + i * length + place, exists, other=0.0)
        direction, keeps, finite = _direction(own, vectors, i, length, BLOCK)
        result = tl.where(keeps, direction, 0.0)
        if HAS_SPARE:
            other = tl.load(spare + i * length + place, exists, other=0.0)
            direction, has_other, finite = _direction(other, vectors, i, length, BLOCK)
            result = tl.where(keeps, result, tl.where(has_other, direction, 0.0))
        else:
            all_finite = all_finite & finite
            result = tl.where(all_finite, result, float("nan"))
        tl.store(vectors + i * length + place, result, exists)
        tl.debug_barrier()  # the next vector's threads read what these have written


def orthogonalize(vectors: Tensor, spare: Tensor | None) -> None:
    k, r, length = vectors.shape
    if vectors.dtype != torch.float32 or length > _MAX_LENGTH:
        reference.orthogonalize(vectors, spare)
        return
    block = max(triton.next_power_of_2(length), 64)
    others = vectors if spare is None else spare
    _orthogonalize[(k,)](
        vectors,
        others,
        r,
        length,
        HAS_SPARE=spare is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
