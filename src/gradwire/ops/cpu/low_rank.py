"""Low-rank factors in numba, for fp32 matrices in host memory, one matrix at a time.

A result depends on its own matrix only, so it is the same in every bucket. Importing this module compiles the
kernels (10 s), or loads them from numba's cache on disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.ops.batches import Batches, Side
from gradwire.ops.cpu import few_vectors, many_vectors, orthogonal
from gradwire.ops.cpu.compiling import kernel
from gradwire.ops.cpu.lines import F4, I4
from gradwire.ops.cpu.scalars import INFINITY, larger
from gradwire.ops.cpu.vectors import STREAMED


@kernel((F4[:, ::1],))
def _is_finite(factor: Any) -> Any:
    largest = I4(0)
    for c in range(factor.shape[0]):
        row = factor[c]
        for j in range(row.size):
            largest = larger(largest, row[j])
    return largest < I4(INFINITY)


def accumulate_and_project(
    batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor, right: Tensor, left: Tensor
) -> None:
    verdicts = votes.numpy()
    for k, values, total, p, q in _matrices(batches, flat, sums, left, right):
        verdicts[k] = _kernels_for(q).accumulate_and_project(values, total, q, p)


def accumulate_and_project_back(
    batches: Batches, flat: Tensor, sums: Tensor, votes: Tensor, left: Tensor, right: Tensor
) -> None:
    verdicts = votes.numpy()
    for k, values, total, p, q in _matrices(batches, flat, sums, left, right):
        verdicts[k] = _kernels_for(p).project_back(values, total, True, p, q)


def project_back(batches: Batches, sums: Tensor, left: Tensor, right: Tensor) -> None:
    lefts, rights, totals = left.numpy(), right.numpy(), sums.numpy()
    for batch in batches:
        factors = batch.factors("left", lefts), batch.factors("right", rights)
        for matrix, p, q in zip(batch.sums(totals), *factors, strict=True):
            _kernels_for(p).project_back(matrix, matrix, False, p, q)


def judge(batches: Batches, side: Side, factor: Tensor, votes: Tensor, kept: Tensor | None) -> None:
    for batch in batches:
        own_votes = batch.each(votes.numpy())
        remembered = None if kept is None else batch.factors(side, kept.numpy())
        for k, found in enumerate(batch.factors(side, factor.numpy())):
            if not _is_finite(found):
                own_votes[k] = np.nan
            if remembered is not None and own_votes[k] > 0:
                remembered[k] = found


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
    verdicts = votes.numpy()
    streams = flat.numel() >= STREAMED
    own = _matrices(batches, flat, sums, own_left, own_right)
    means = _factors(batches, left, right)
    for (k, values, total, own_p, own_q), (p, q) in zip(own, means, strict=True):
        vote = verdicts[k]
        if vote > 0:
            many_vectors.finish(p, q, own_p, own_q, total, sums is not None, values, streams)
            continue
        if sums is not None:
            np.subtract(total, np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), out=total)
        values[:] = vote


def orthogonalize(batches: Batches, side: Side, factor: Tensor, spare: Tensor | None) -> None:
    for batch in batches:
        vectors = batch.factors(side, factor.numpy())
        others = vectors if spare is None else batch.factors(side, spare.numpy())
        for own, other in zip(vectors, others, strict=True):
            orthogonal.orthogonalize(own, other, spare is not None)


def _kernels_for(basis: Any) -> ModuleType:
    """Return the kernels for this number of vectors."""
    return few_vectors if len(basis) <= few_vectors.MAX_VECTORS else many_vectors


def _factors(batches: Batches, left: Tensor, right: Tensor) -> Iterator[tuple[Any, Any]]:
    lefts, rights = left.numpy(), right.numpy()
    for batch in batches:
        yield from zip(batch.factors("left", lefts), batch.factors("right", rights), strict=True)


def _matrices(
    batches: Batches, flat: Tensor, sums: Tensor | None, left: Tensor, right: Tensor
) -> Iterator[tuple[int, Any, Any, Any, Any]]:
    """Yield each matrix's number, values, sums (the values again if ``sums`` is None) and two factors."""
    number, factors = itertools.count(), _factors(batches, left, right)
    bucket = flat.numpy()
    totals = bucket if sums is None else sums.numpy()
    for batch in batches:
        values = batch.values(bucket)
        own = values if sums is None else batch.sums(totals)
        for value, total in zip(values, own, strict=True):
            yield next(number), value, total, *next(factors)
