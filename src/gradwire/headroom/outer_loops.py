"""Outer loops, which average parameters every few steps: what a link allows, and what they send."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The recipe of a `gradwire.DiLoCo` that is given none.
OUTER_RECIPE = "int4"
# Part of the time that a link may be busy, for others use it too, and its rate changes.
_MOST_BUSY = 0.8
# Part of a period. With a delay of 2 in 40 steps, ranks that kept their steps lost nothing to averages with
# none; with 8 in 40 they lost more than by taking the whole average (docs/fidelity-details.md).
_SHORT_DELAY = 1 / 20


@dataclass(frozen=True)
class OuterPrediction:
    """One predicted outer loop: `gradwire.LocalSGD` with a `gradwire.DiLoCo`."""

    period: int
    """Steps between two averagings of a fragment."""
    fragments: int
    delay: int
    """Steps between the start and the end of an averaging."""
    step_s: float
    """A step in the mean, with its share of the waiting."""
    compute_s: float
    bytes_per_step: int
    """Bytes that a node sends through its link, in the mean over a period."""
    turn_bytes: int
    """Bytes that a node sends for the largest fragment."""
    peak: float
    """The bytes of the largest fragment over those of a mean one."""
    turn_s: float
    """Time to average the largest fragment."""
    least_period: int
    """The shortest period that leaves a fifth of the time free."""

    @property
    def efficiency(self) -> float:
        """The scaling efficiency: the share of compute in a step, from 0 to 1."""
        return self.compute_s / self.step_s

    def call(self, recipe: str = OUTER_RECIPE) -> str:
        """Return the code that trains so, for a ``model`` and its ``optimizer``."""
        named = "" if recipe == OUTER_RECIPE else f", recipe={recipe!r}"
        keeps = ", keeps_steps=True" if 0 < self.delay <= _SHORT_DELAY * self.period else ""
        outer = f"gradwire.DiLoCo(fragments={self.fragments}, delay={self.delay}{keeps})"
        return f"gradwire.LocalSGD(model, optimizer, period={self.period}{named}, outer={outer})"


def predict_outer_loop(
    whole_s: float,
    whole_bytes: float,
    compute_s: float,
    *,
    period: int | None = None,
    fragments: int = 1,
    delay: int | None = None,
    peak: float = 1.0,
    work_s: float = 0.0,
) -> OuterPrediction:
    """Predict an outer loop from one averaging of the whole model.

    Args:
        whole_s: the time of that averaging, with nothing beside it.
        whole_bytes: the bytes that it sends.
        compute_s: the time of a step without communication.
        period: the number of steps between averagings; None for the shortest that leaves a fifth of the time
            free, and that has as many steps between any two turns.
        fragments: the number of fragments, which are averaged in turn.
        delay: the number of steps in which an averaging travels; None for the smallest that hides it. Other
            fragments have turns too, so that is at most the largest one's share of a period.
        peak: the largest fragment's size over that of a mean one.
        work_s: the time that averaging the whole model takes from the steps beside it.

    Raises ValueError if the period is too short for the fragments, or for the delay.

    >>> found = predict_outer_loop(8.0, 2e6, 0.1, fragments=4)
    >>> found.period, found.delay, found.bytes_per_step, found.turn_bytes
    (100, 20, 20000, 500000)
    """
    least_period = max(1, math.ceil(whole_s / (_MOST_BUSY * compute_s)))
    if period is None:
        period = fragments * math.ceil(least_period / fragments)
    if period < fragments:
        raise ValueError(f"a period of {period} steps is too short for {fragments} fragments")
    if delay is not None and delay >= period:
        raise ValueError(f"a delay of {delay} steps is not less than the period of {period}")
    turn_s, turn_steps = whole_s * peak / fragments, period / fragments
    if delay is None:
        delay = min(math.ceil(turn_s / compute_s), max(1, math.floor(turn_steps * peak)), period - 1)
    waiting_s = max(0.0, turn_s - delay * compute_s)
    # A longer delay does not help a link that has more to carry than it can.
    step_s = max(compute_s + waiting_s / turn_steps, whole_s / period)
    return OuterPrediction(
        period=period,
        fragments=fragments,
        delay=delay,
        step_s=step_s + work_s / period,
        compute_s=compute_s,
        bytes_per_step=round(whole_bytes / period),
        turn_bytes=round(whole_bytes * peak / fragments),
        peak=peak,
        turn_s=turn_s,
        least_period=least_period,
    )
