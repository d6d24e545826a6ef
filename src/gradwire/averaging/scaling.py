"""The factor of a sum over ranks: that of a mean, a sum, a mean over some ranks, or a weighted mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.ops import Scale
from gradwire.peers import Group, SealedClaim, gather_if_same, gather_rows
from gradwire.recipes import Reduction


@dataclass(frozen=True)
class Scaling:
    """The factor of a sum over ranks: 1 for a sum, 1/W for a mean."""

    reduction: Reduction
    is_active: bool | None = None
    """None for a mean over all ranks; otherwise the mean is over the ranks that have True."""
    weight: float | None = None
    """This rank's weight in a weighted mean; None if all ranks count alike."""
    given: float | None = None
    """The factor itself, if the caller has given it."""
    divisor: float = 1.0
    """By this, the caller divides the result afterwards."""
    claim: SealedClaim | None = None
    """A claim to compare before the first message; on CUDA it is not, since the host would wait."""

    def begin(self, flat: Tensor, group: Group) -> Scale:
        """Weigh this rank's values, and return the factor of their sum over ranks.

        Raises ValueError on every rank if claims differ, or if all weights are 0. (On CUDA, a mean with
        weights that are all 0 is NaN.)
        """
        weights = None
        if self.claim is not None and not flat.is_cuda:
            numbers = gather_if_same(self.claim, self.weight or 0.0, group, flat.device)
            weights = torch.tensor(numbers, dtype=torch.float64)
        if self.weight is None:
            return self.factor(flat.device, group)
        if weights is None:
            weights = _gather_number(self.weight, flat.device, group)
        return _weigh(flat, self.weight, weights)

    def factor(self, device: torch.device, group: Group) -> Scale:
        """Return the factor. A mean over active ranks counts them: that is collective."""
        if self.is_active is not None:
            return 1 / _gather_number(float(self.is_active), device, group).sum()
        if self.given is not None:
            return self.given
        return 1.0 if self.reduction == "sum" else 1 / group.size


def _weigh(flat: Tensor, weight: float, weights: Tensor) -> Scale:
    """Multiply by this rank's weight over the largest one, so that nothing overflows; return the factor."""
    largest, total = weights.max(), weights.sum()
    require_weight(total)
    if weight == 0:
        flat.zero_()  # not a product: the values of a rank without weight may be infinite
    else:
        flat.mul_(weight / largest)
    return largest / total if flat.is_cuda else float(largest / total)


def require_weight(total: Tensor) -> None:
    """Raise ValueError if the weights of all ranks add up to 0; on CUDA do nothing: the host would wait."""
    if not total.is_cuda and not total:
        raise ValueError("the weights of all ranks are 0: give at least one rank a positive weight")


def _gather_number(own: float, device: torch.device, group: Group) -> Tensor:
    """Return every rank's number, as fp64 on ``device``; collective."""
    # Filled, not copied: on CUDA, the host would wait for a copy.
    return gather_rows(torch.full((), own, dtype=torch.float64, device=device), group)
