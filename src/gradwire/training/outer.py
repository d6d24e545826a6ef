"""Outer optimizers, which local SGD steps with the averaged movement of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Outer(Protocol):
    """An optimizer of the pseudo-gradient: how far ranks moved on average, with the sign reversed."""

    def update(self, start: Tensor, pseudo_gradient: Tensor, momentum: Tensor, inner_lr: float) -> None:
        """Update ``start`` and ``momentum`` in place; ``inner_lr`` is the local optimizer's learning rate."""
        ...


@dataclass(frozen=True)
class SlowMo:
    """Slow momentum over the averaged steps (Wang et al. 2019, arXiv:1910.00643, equations 2 and 3).

    >>> SlowMo(momentum=0.7)
    SlowMo(momentum=0.7, lr=1.0)
    """

    momentum: float = 0.5
    lr: float = 1.0

    def __post_init__(self) -> None:
        _check_hyperparameters(self.momentum, self.lr)

    def update(self, start: Tensor, pseudo_gradient: Tensor, momentum: Tensor, inner_lr: float) -> None:
        momentum.mul_(self.momentum)
        if inner_lr:  # at a learning rate of 0 no rank has moved
            momentum.add_(pseudo_gradient, alpha=1 / inner_lr)
        start.sub_(momentum, alpha=self.lr * inner_lr)


@dataclass(frozen=True)
class DiLoCo:
    """Nesterov momentum over the averaged steps (Douillard et al. 2023, arXiv:2311.08105).

    >>> DiLoCo()
    DiLoCo(lr=0.7, momentum=0.9)
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_hyperparameters(self.momentum, self.lr)

    def update(self, start: Tensor, pseudo_gradient: Tensor, momentum: Tensor, inner_lr: float) -> None:
        momentum.mul_(self.momentum).add_(pseudo_gradient)
        start.sub_(pseudo_gradient, alpha=self.lr).sub_(momentum, alpha=self.lr * self.momentum)


def _check_hyperparameters(momentum: float, lr: float) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, not {momentum}")
    if not lr > 0:
        raise ValueError(f"lr must be more than 0, not {lr}")
