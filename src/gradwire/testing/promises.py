"""What a recipe promises about its averages, in the terms of `check_hook`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradwire.codecs import Cast, Codec, Raw
from gradwire.exchanges import Exchange
from gradwire.recipes import Recipe

Expect = Literal["mean", "sum", "local"]

# Sums are fp32: a few last places, 2^-24 each.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Promise:
    """What averages are held to, see `check_hook`; by default what is expected of a hook."""

    tolerance: float | None = 1e-5
    """None where no bound is known."""
    floor: float = 0.01
    feedback: bool = False
    expect: Expect = "mean"


def promise_of(recipe: Recipe, world_size: int) -> Promise:
    """What follows from a recipe's codecs on so many ranks; that of low rank depends on the gradients."""
    exchanges = [each.exchange for each in recipe.leaves()]
    lossy = [exchange for exchange in exchanges if _max_error(exchange) != 0.0]
    kept = {_keeps(exchange) for exchange in lossy}
    bounds = [_bound(exchange, world_size) for exchange in exchanges]
    known = [bound for bound in bounds if bound is not None]
    # Errors of single steps do not cancel in sums over steps, nor are steps right where only sums are.
    is_known = len(known) == len(bounds) and len(kept) <= 1
    return Promise(
        tolerance=max(_ROUNDING, *known) if is_known else None,
        floor=0.01 if all(isinstance(_codec(exchange), Raw | Cast) for exchange in lossy) else 1.0,
        feedback=True in kept,
        expect=recipe.reduction if recipe.exchange.communicates else "local",
    )


def _bound(exchange: Exchange, world_size: int) -> float | None:
    """The largest error of a mean, relative to its largest value; None if it is not known.

    In the first shot a rank's row is off by at most a part of its own largest gradient, taken to be at most
    as many times the largest mean as there are ranks; in the second, the sum's row by the same part of the
    sum. With feedback each part is of what is held back already, too: e + e^2 + ... .
    """
    part = _max_error(exchange)
    if part is None or (_keeps(exchange) and part >= 1):
        return None
    if _keeps(exchange):
        part /= 1 - part
    return part * (1 + world_size * (1 + part))


def _max_error(exchange: Exchange) -> float | None:
    if not exchange.communicates:
        return 0.0
    codec = _codec(exchange)
    return None if codec is None else codec.max_error


def _codec(exchange: Exchange) -> Codec | None:
    """What all of a bucket travels as, if it does as one thing."""
    return getattr(exchange, "codec", None)


def _keeps(exchange: Exchange) -> bool:
    return getattr(exchange, "feedback", None) not in (None, False)
