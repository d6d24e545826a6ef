"""The names of rows of local SGD in `convergence.py`, such as DiLoCo:period=40,fragments=4,recipe=int4.

Options are period (in steps), those of gradwire.DiLoCo (lr, momentum, fragments, order, delay, alpha,
keeps_steps), inner (the peak of the inner learning rate), and last of all recipe, with its own options.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradwire

KINDS = ("LocalSGD", "DiLoCo")
OPTIONS: dict[str, Callable[[str], Any]] = {
    "lr": float,
    "momentum": float,
    "fragments": int,
    "delay": int,
    "alpha": float,
    "order": str,
    "keeps_steps": lambda text: text == "true",
}


@dataclass(frozen=True)
class LocalRow:
    """A way to train with local SGD."""

    period: int
    outer: gradwire.DiLoCo | None
    recipe: gradwire.Recipe
    inner_lr: float | None
    """The peak of the inner learning rate; None for the setting's own."""


def parse(name: str) -> LocalRow | None:
    """Return what a row's name says; None if it is not local SGD. Raises ValueError for a wrong option.

    >>> parse("DiLoCo:period=40,lr=0.5,recipe=int4:block=64,feedback=false").recipe
    Recipe(name='int4:block=64,feedback=false', ...)
    """
    kind, _, text = name.partition(":")
    if kind not in KINDS:
        return None
    text, _, recipe = text.partition("recipe=")
    found = dict(option.partition("=")[::2] for option in text.strip(",").split(",") if option)
    period, inner = found.pop("period", ""), found.pop("inner", None)
    if not period.isdigit() or int(period) < 1:
        raise ValueError(f"{name} has no valid period; write {kind}:period=8, with a number of at least 1")
    if unknown := sorted(found.keys() - OPTIONS.keys()) or (kind == "LocalSGD" and sorted(found)):
        raise ValueError(f"{name}: {kind} has no option {unknown[0]!r}; put recipe= last")
    options = {key: OPTIONS[key](value) for key, value in found.items()}
    outer = gradwire.DiLoCo(**options) if kind == "DiLoCo" else None
    chosen = gradwire.recipe(recipe or "fp32")
    return LocalRow(int(period), outer, chosen, None if inner is None else float(inner))
