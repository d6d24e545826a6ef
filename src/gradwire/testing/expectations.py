"""The accuracy that a recipe is held to, derived from its encodings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gradwire.codecs import Cast, Codec, Raw
from gradwire.exchanges import Exchange
from gradwire.recipes import Recipe

Expect = Literal["mean", "sum", "local"]

# Sums are fp32: a few last places, 2^-24 each.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Expectation:
    """Bounds on the results of a hook, in the terms of `check_hook`. The defaults are those of any hook."""

    tolerance: float | None = 1e-5
    """None if no bound is known."""
    floor: float = 0.01
    feedback: bool = False
    expect: Expect = "mean"
    residual_unit: float | None = None
    """The relative error of rounding to the residuals' dtype; None if something is left out for good."""
    unbiased: bool = False
    """True if rows are larger than what they encode, so that they are right on average."""
    momentum: float = 0.0
    """The momentum that ranks apply before they send."""

    def tolerance_or(self, given: float | None, name: str) -> float:
        """Return the ``given`` tolerance, by default that of the recipe ``name``; ValueError without one."""
        tolerance = self.tolerance if given is None else given
        if tolerance is None:
            raise ValueError(
                f"what {name} leaves out depends on the gradients, so no tolerance follows from it: give "
                "one, tolerance=...; docs/testing.md has those of gradwire's own tests"
            )
        return tolerance


def expectation_of(recipe: Recipe, world_size: int) -> Expectation:
    """Derive the bounds of a recipe on ``world_size`` ranks from its codecs.

    The tolerance is None if errors depend on the gradients, as those of low rank do.
    """
    exchanges = [each.exchange for each in recipe.leaves()]
    lossy = [exchange for exchange in exchanges if _max_error(exchange) != 0.0]
    has_feedback = {_has_feedback(exchange) for exchange in lossy}
    bounds = [_bound(exchange, world_size) for exchange in exchanges]
    known = [bound for bound in bounds if bound is not None]
    # Without feedback, errors of steps do not cancel in sums over steps. With it, only these sums are right.
    is_known = len(known) == len(bounds) and len(has_feedback) <= 1
    return Expectation(
        tolerance=max(_ROUNDING, *known) if is_known else None,
        floor=0.01 if all(isinstance(_codec(exchange), Raw | Cast) for exchange in lossy) else 1.0,
        feedback=True in has_feedback,
        expect=recipe.reduction if recipe.exchange.communicates else "local",
        residual_unit=max(map(_residual_unit, lossy)) if has_feedback == {True} else None,
        unbiased=any(_is_unbiased(exchange) for exchange in lossy),
        momentum=recipe.momentum,
    )


def _bound(exchange: Exchange, world_size: int) -> float | None:
    """Return the largest error of a mean, relative to its largest value; None if it is not known.

    In the first phase, the error of a rank's row is at most a part of its own largest gradient. That is
    taken to be at most ``world_size`` times the largest mean. In the second phase, the error of the sum's row
    is at most the same part of the sum. With feedback, each part is also of what is held back already:
    e + e^2 + ... . Over a grid of ranks, sums of rows are encoded too, with errors like the first phase's.
    """
    part = _max_error(exchange)
    if part is None or (_has_feedback(exchange) and part >= 1):
        return None
    if _has_feedback(exchange):
        part /= 1 - part
    num_encodings = 2 if getattr(exchange, "encodes_within", False) else 1
    return part * (1 + num_encodings * world_size * (1 + part))


def _max_error(exchange: Exchange) -> float | None:
    if not exchange.communicates:
        return 0.0
    codec = _codec(exchange)
    return None if codec is None else codec.max_error


def _codec(exchange: Exchange) -> Codec | None:
    """Return the codec of the whole bucket; None if it has no single one."""
    return getattr(exchange, "codec", None)


def _is_unbiased(exchange: Exchange) -> bool:
    codec = _codec(exchange)
    return codec is not None and getattr(codec.to_owner, "unbiased", False)


def _has_feedback(exchange: Exchange) -> bool:
    return getattr(exchange, "feedback", None) not in (None, False)


def _residual_unit(exchange: Exchange) -> float:
    dtype = getattr(exchange, "feedback", None)
    # Low rank has no dtype of its own: its residuals are at least fp32.
    return torch.finfo(dtype if isinstance(dtype, torch.dtype) else torch.float32).eps / 2
