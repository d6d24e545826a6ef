"""Checks of the arguments of `LocalSGD`."""

from __future__ import annotations

from datetime import timedelta

from gradwire.recipes import Recipe, require_fixed
from gradwire.recipes import recipe as parse_recipe
from gradwire.training.outer import DiLoCo, Outer


def streaming_of(outer: Outer | None) -> DiLoCo:
    """Return how averagings are spread over a period; by default all at once."""
    return outer if isinstance(outer, DiLoCo) else DiLoCo()


def check_period(period: int | timedelta, warmup_steps: int, delay: int) -> None:
    """Raise ValueError or TypeError for a period, a warm-up or a delay that cannot be."""
    if isinstance(period, timedelta):
        if period <= timedelta(0):
            raise ValueError(f"period must be more than 0 seconds, not {period.total_seconds():g}")
    elif not isinstance(period, int) or isinstance(period, bool):
        raise TypeError(f"period is a number of steps or a datetime.timedelta, not {period!r}")
    elif period < 1:
        raise ValueError(f"period must be at least 1, not {period}")
    elif delay >= period:
        raise ValueError(
            f"delay must be less than the period of {period} steps, not {delay}: an averaging ends before "
            "the next one of the same parameters begins"
        )
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, not {warmup_steps}")


def parse_averaging(recipe: str | Recipe | None, streams: bool, weigh: bool) -> Recipe:
    """Return the recipe for parameters, or the default; ValueError if it does not average."""
    if recipe is None:
        # In 4 bits the loss is that of fp32 (docs/fidelity.md).
        recipe = ("int4:feedback=false" if weigh else "int4") if streams else "fp32"
    chosen = parse_recipe(recipe)
    require_fixed(chosen, "local SGD")
    if not chosen.exchange.communicates or chosen.reduction != "mean":
        raise ValueError(f"local SGD needs a recipe that averages, and {chosen} does not: choose another")
    return chosen
