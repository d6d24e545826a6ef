"""Low-rank factors of a bucket's matrices, op by op in torch: what the kernels equal, within rounding.

A matrix M of a bucket, (n, m), is kept as a sum of gradients. Its factors are kept as rows, P of the left
side as (r, n) and Q of the right one as (r, m), so that M is about ``P.T @ Q``. A matrix has a *vote*: 0 if
all its values are zero, positive if not, NaN if one is not finite. Only one with a positive vote counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.ops.batches import Batches, Side


def accumulate(batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor) -> None:
    """Add to ``sums`` what is finite of the bucket's matrices, and vote."""
    for batch in batches:
        own_votes = batch.each(votes)
        for k, (values, total) in enumerate(zip(batch.values(flat), batch.sums(sums), strict=True)):
            largest = torch.linalg.vector_norm(values.to(total.dtype), float("inf"))
            own_votes[k] = (largest != 0) + largest * 0
            total.add_(_finite(values))


def accumulate_and_project(
    batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor, right: Tensor, left: Tensor
) -> None:
    """`accumulate`, then `project`."""
    accumulate(batches, flat, sums, votes)
    project(batches, sums, right, left)


def accumulate_and_project_back(
    batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor, left: Tensor, right: Tensor
) -> None:
    """`accumulate`, then `project_back`."""
    accumulate(batches, flat, sums, votes)
    project_back(batches, sums, left, right)


def project(batches: Batches, sums: Tensor, right: Tensor, left: Tensor) -> None:
    """``P = Q @ M.T``."""
    for batch in batches:
        basis, out = batch.factors("right", right), batch.factors("left", left)
        torch.bmm(basis, batch.sums(sums).mT, out=out)


def project_back(batches: Batches, sums: Tensor, left: Tensor, right: Tensor) -> None:
    """``Q = P @ M``."""
    for batch in batches:
        torch.bmm(batch.factors("left", left), batch.sums(sums), out=batch.factors("right", right))


def judge(batches: Batches, side: Side, factor: Tensor, votes: Tensor, kept: Tensor | None) -> None:
    """Make votes NaN where the factor is not finite; where they are positive, keep the factor."""
    for batch in batches:
        found, own_votes = batch.factors(side, factor), batch.each(votes)
        own_votes.add_(torch.linalg.vector_norm(found, float("inf"), dim=(1, 2)), alpha=0)
        if kept is not None:
            remembered = batch.factors(side, kept)
            torch.where(own_votes.view(-1, 1, 1) > 0, found, remembered, out=remembered)


def finish(
    batches: Batches,
    flat: Tensor,
    sums: Tensor | None,
    left: Tensor,
    right: Tensor,
    own_left: Tensor,
    own_right: Tensor,
    votes: Tensor,
) -> None:
    """Write ``P.T @ Q`` to the bucket, and take that of this rank's own factors from ``sums``, if there are.

    A matrix without a positive vote becomes its vote, zero or NaN, and the sums what they were before.
    """
    for batch in batches:
        own_votes = batch.each(votes).view(-1, 1, 1)
        values = batch.values(flat)
        if sums is not None:
            sent = batch.factors("left", own_left).mT @ batch.factors("right", own_right)
            added = torch.stack([_finite(value).to(sums.dtype) for value in values])
            batch.sums(sums).sub_(torch.where(own_votes > 0, sent, added))
        products = batch.factors("left", left).mT @ batch.factors("right", right)
        for value, product, vote in zip(values, products, own_votes, strict=True):
            value.copy_(torch.where(vote > 0, product, vote))


def orthogonalize(batches: Batches, side: Side, factor: Tensor, spare: Tensor | None) -> None:
    """Make the vectors of each matrix orthonormal, in place and in order.

    Gram-Schmidt, each vector brought to a largest magnitude of one first, so that nothing overflows or
    vanishes, and projected twice, so that nothing is left of the others. A vector of which the others leave
    no more than rounding becomes zero. With ``spare``, it becomes that one's vector instead, made orthogonal
    to those before it, and so does one that is not finite; without, it makes all after it NaN.
    """
    for batch in batches:
        others = None if spare is None else batch.factors(side, spare)
        _orthogonalize(batch.factors(side, factor), others)


def _orthogonalize(vectors: Tensor, spare: Tensor | None) -> None:
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


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


# Rounding leaves about 2^-24 of a vector's length per term of a product, more the longer it is.
NEGLIGIBLE = {torch.float32: 2.0**-19, torch.float64: 2.0**-46}
