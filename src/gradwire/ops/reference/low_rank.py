"""Low-rank factors of a bucket's matrices, in torch: the kernels equal these within rounding.

A matrix M of a bucket, (n, m), is a sum of gradients. Its factors are stored as rows, P of the left side as
(r, n) and Q of the right side as (r, m), so that M is about ``P.T @ Q``. Each matrix has a *vote*: 0 if all
its values are zero, NaN if one is not finite, positive otherwise. Only matrices with a positive vote count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.ops.batches import Batches, Side


def accumulate(batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor) -> None:
    """Add the finite values of the bucket's matrices to ``sums``, and write the votes."""
    for batch in batches:
        own_votes = batch.each(votes)
        for k, (values, total) in enumerate(zip(batch.values(flat), batch.sums(sums), strict=True)):
            largest = torch.linalg.vector_norm(values.to(total.dtype), float("inf"))
            own_votes[k] = (largest != 0) + largest * 0
            total.add_(_finite(values))


def accumulate_and_project(
    batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor, right: Tensor, left: Tensor
) -> None:
    """Call `accumulate`, then `project`."""
    accumulate(batches, flat, sums, votes)
    project(batches, sums, right, left)


def accumulate_and_project_back(
    batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor, left: Tensor, right: Tensor
) -> None:
    """Call `accumulate`, then `project_back`."""
    accumulate(batches, flat, sums, votes)
    project_back(batches, sums, left, right)


def project(batches: Batches, sums: Tensor, right: Tensor, left: Tensor) -> None:
    """Write ``P = Q @ M.T`` to ``left``."""
    for batch in batches:
        basis, out = batch.factors("right", right), batch.factors("left", left)
        torch.bmm(basis, batch.sums(sums).mT, out=out)


def project_back(batches: Batches, sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Write ``Q = P @ M`` to ``right``."""
    for batch in batches:
        torch.bmm(batch.factors("left", left), batch.sums(sums), out=batch.factors("right", right))


def judge(batches: Batches, side: Side, factor: Tensor, votes: Tensor, kept: Tensor | None) -> None:
    """Make the votes NaN where the factor is not finite; copy it to ``kept`` where they are positive."""
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
    """Write ``P.T @ Q`` to the bucket, and subtract the product of this rank's own factors from ``sums``.

    A matrix without a positive vote becomes its vote, zero or NaN; its sums become what they were before
    `accumulate`.
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

    This is Gram-Schmidt. Each vector is first scaled to a largest magnitude of one, so that nothing overflows
    or vanishes, and is projected twice, so that nothing of the others is left in it. A vector that depends on
    those before it, up to rounding, becomes zero. With ``spare``, it becomes the spare vector of its place,
    made orthogonal to those before it. So does a vector that is not finite. Without ``spare``, such a vector
    makes itself and all after it NaN.
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
    """Return the unit vector of what is orthogonal to ``before``, and True where that is not negligible."""
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


# Rounding leaves about 2^-24 of a vector's length per term of a product, so more in longer vectors.
NEGLIGIBLE = {torch.float32: 2.0**-19, torch.float64: 2.0**-46}
# Largest squared condition number of unit vectors that kernels make orthogonal at once. With it, rounding in
# fp64 disturbs their orthogonality about as much as rounding the result to fp32 does.
MAX_CONDITION = 2.0**26
