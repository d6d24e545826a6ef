"""Low-rank factors of batches of matrices, op by op in torch: what the kernels must equal, within rounding.

Shapes: a batch of k matrices M is (k, n, m); factors are kept as rows, P as (k, r, n) and Q as (k, r, m), so
that M is about ``P.mT @ Q``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulate(values: Sequence[Tensor], sums: Sequence[Tensor], largest: Tensor) -> None:
    """Add values that are finite to ``sums``, set the others to zero; the largest magnitudes, before that."""
    largest.copy_(torch.stack(torch._foreach_norm(list(values), ord=float("inf"))))
    for value, total in zip(values, sums, strict=True):
        total.add_(value.nan_to_num_(0.0, 0.0, 0.0))


def project(matrices: Tensor, basis: Tensor, out: Tensor) -> None:
    """``out[k] = basis[k] @ matrices[k].T``."""
    torch.bmm(basis, matrices.mT, out=out)


def accumulate_and_project(
    values: Sequence[Tensor], matrices: Tensor, largest: Tensor, basis: Tensor, out: Tensor
) -> None:
    """`accumulate` into the matrices, then `project`."""
    accumulate(values, list(matrices), largest)
    project(matrices, basis, out)


def project_back(matrices: Tensor, basis: Tensor, out: Tensor) -> None:
    """``out[k] = basis[k] @ matrices[k]``."""
    torch.bmm(basis, matrices, out=out)


def subtract(matrices: Tensor, left: Tensor, right: Tensor) -> None:
    """``matrices[k] -= left[k].T @ right[k]``."""
    matrices.baddbmm_(left.mT, right, alpha=-1)


def multiply(left: Tensor, right: Tensor, out: Sequence[Tensor]) -> None:
    """``out[k] = left[k].T @ right[k]``, in whatever dtype ``out`` is."""
    for k, values in enumerate(out):
        if values.dtype == left.dtype:
            torch.mm(left[k].T, right[k], out=values)
        else:
            values.copy_(left[k].T @ right[k])


def orthogonalize(vectors: Tensor, spare: Tensor | None) -> None:
    """Make the vectors of each matrix, (k, r, length), orthonormal, in place and in order.

    Gram-Schmidt, each vector brought to a largest magnitude of one first, so that nothing overflows or
    vanishes, and projected twice, so that nothing is left of the others. A vector of which the others leave
    no more than rounding becomes zero. With ``spare``, it becomes that one's vector instead, made orthogonal
    to those before it, and so does one that is not finite; without, it makes all after it NaN.
    """
    for i in range(vectors.shape[1]):
        own, before = vectors[:, i], vectors[:, :i]
        direction, keeps = _direction(own, before)
        if spare is not None:
            other, has_other = _direction(spare[:, i], before)
            direction = torch.where(keeps, direction, other.where(has_other, 0.0))
        else:
            direction = torch.where(keeps | direction.isnan(), direction, 0.0)
        own.copy_(direction)


def _direction(own: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The part of unit length that is orthogonal to the vectors before, and whether there is one."""
    top = torch.linalg.vector_norm(own, float("inf"), dim=1, keepdim=True)
    rest = own / torch.where(top == 0, 1.0, top)
    whole = torch.linalg.vector_norm(rest, dim=1, keepdim=True)
    for _ in range(2):
        shares = torch.bmm(before, rest[:, :, None])
        rest = torch.baddbmm(rest[:, :, None], before.mT, shares, alpha=-1)[:, :, 0]
    length = torch.linalg.vector_norm(rest, dim=1, keepdim=True)
    keeps = length > NEGLIGIBLE[own.dtype] * whole
    return rest / torch.where(length == 0, 1.0, length), keeps


# Rounding leaves about 2^-24 of a vector's length per term of a product, more the longer it is.
NEGLIGIBLE = {torch.float32: 2.0**-19, torch.float64: 2.0**-46}
