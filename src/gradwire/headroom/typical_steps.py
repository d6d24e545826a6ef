"""The figures of a typical step, from the steps that a wire has kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradwire.telemetry import Figure, StepStats, total_of

# DDP makes its final buckets in the first two steps.
_NUM_FIRST = 2


def sent_per_step(steps: Sequence[StepStats], figure: Figure) -> float | None:
    """Return the bytes or the messages of a step; None if unknown.

    It is the mean of two steps: a recipe may send one thing in even steps and another in odd ones.
    """
    last = steps[-2:]
    total = total_of((bucket for step in last for bucket in step.buckets), figure)
    return None if total is None or not last else total / len(last)


def typical_ms(steps: Sequence[StepStats], figure: Figure) -> float | None:
    """Return the time that the buckets of a step take: the median of all steps; None if unknown."""
    totals = [total_of(step.buckets, figure) for step in steps[_NUM_FIRST:] or steps]
    known = [total for total in totals if total is not None]
    return statistics.median(known) if known else None
