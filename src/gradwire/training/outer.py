"""Outer optimizers, which local SGD steps with the averaged movement of the ranks."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from torch import Tensor

from gradwire.training.partition import Order, divide


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

    With ``fragments`` or a ``delay`` it streams (Douillard et al. 2025, arXiv:2501.18512): the model is
    averaged one fragment at a time, spread evenly over the period, while training goes on.

    Args:
        lr: the outer learning rate.
        momentum: the outer momentum.
        fragments: the number of fragments, of nearly as many values each, made of whole layers. Or patterns
            of parameters' names, as in ``fnmatch``: a pattern or a list of patterns for each fragment. A
            parameter belongs to the first fragment that matches.
        order: ``"strided"``: a fragment's layers are spread over the model; ``"consecutive"``: neighbours.
        delay: the number of steps from the start of an averaging to its end. Training goes on meanwhile.
        alpha: the share of its own parameters that a rank keeps at the end of an averaging; the rest is the
            average. 0 lost less than the paper's 0.5 where both were measured.
        keeps_steps: True to take the whole average, and add the steps that the rank has taken since the
            averaging began. The outer momentum then counts as without a delay. Best with a short delay.

    Raises ValueError or TypeError for arguments that do not fit.

    >>> DiLoCo(fragments=4, delay=2)
    DiLoCo(lr=0.7, momentum=0.9, fragments=4, order='strided', delay=2, alpha=0.0, keeps_steps=False)
    """

    lr: float = 0.7
    momentum: float = 0.9
    fragments: int | Sequence[str | Sequence[str]] = 1
    order: Order = "strided"
    delay: int = 0
    alpha: float = 0.0
    keeps_steps: bool = False

    def __post_init__(self) -> None:
        _check_hyperparameters(self.momentum, self.lr)
        if isinstance(self.fragments, int) and not isinstance(self.fragments, bool):
            if self.fragments < 1:
                raise ValueError(f"fragments must be at least 1, not {self.fragments}")
        else:
            object.__setattr__(self, "fragments", _patterns(self.fragments))
        if self.order not in typing.get_args(Order):
            raise ValueError(f"order must be 'strided' or 'consecutive', not {self.order!r}")
        if not isinstance(self.delay, int) or isinstance(self.delay, bool) or self.delay < 0:
            raise ValueError(f"delay must be a number of steps, at least 0, not {self.delay!r}")
        if not isinstance(self.keeps_steps, bool):
            raise TypeError(f"keeps_steps must be True or False, not {self.keeps_steps!r}")
        _check_number("alpha", self.alpha)
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must be at least 0 and less than 1, not {self.alpha}")
        if self.keeps_steps and self.alpha:
            raise ValueError("keeps_steps takes the whole average, so that there is no alpha: leave one out")

    @property
    def streams(self) -> bool:
        """True if the model is averaged in fragments, or while training goes on."""
        return self.num_fragments > 1 or self.delay > 0

    @property
    def num_fragments(self) -> int:
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    def divide(self, numels: Mapping[str, int]) -> list[list[str]]:
        """Return the names of each fragment's parameters; ``numels`` has every parameter's number of values.

        Raises ValueError if they cannot be divided so.
        """
        fragments = self.fragments if isinstance(self.fragments, int) else _patterns(self.fragments)
        return divide(numels, fragments, self.order)

    def update(self, start: Tensor, pseudo_gradient: Tensor, momentum: Tensor, inner_lr: float) -> None:
        momentum.mul_(self.momentum).add_(pseudo_gradient)
        start.sub_(pseudo_gradient, alpha=self.lr).sub_(momentum, alpha=self.lr * self.momentum)


def _patterns(fragments: object) -> tuple[tuple[str, ...], ...]:
    """Return each fragment's patterns as a tuple, so that outer optimizers compare and print alike."""
    if isinstance(fragments, str) or not isinstance(fragments, Sequence) or not fragments:
        raise TypeError(f"fragments is a number, or patterns for each fragment, not {fragments!r}")
    found = tuple((each,) if isinstance(each, str) else tuple(each) for each in fragments)
    if not all(each and all(isinstance(pattern, str) for pattern in each) for each in found):
        raise TypeError(f"each fragment is a pattern of names or a list of patterns, not {fragments!r}")
    return found


def _check_hyperparameters(momentum: float, lr: float) -> None:
    _check_number("momentum", momentum)
    _check_number("lr", lr)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, not {momentum}")
    if not lr > 0:
        raise ValueError(f"lr must be more than 0, not {lr}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
