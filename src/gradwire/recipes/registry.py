"""The only registry of recipes by name, and the factory of ``auto``, which chooses among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.recipes.factories import (
    acp,
    bf16,
    fp8,
    fp16,
    fp32,
    int2,
    int3,
    int4,
    int8,
    noop,
    powersgd,
    sign,
    topk,
)
from gradwire.recipes.option_text import format_spec, parse_options
from gradwire.recipes.tuning import DEFAULT_BUDGET, Encoding, Tuning, between
from gradwire.recipes.value import Recipe, Reduction


def auto(
    budget: float = DEFAULT_BUDGET,
    bytes: float | None = None,  # noqa: A002  # what users write
    every: int = 500,
    floor: Encoding = "int2",
    ceiling: Encoding = "fp32",
    feedback: bool = False,
    log: bool = True,
    reduction: Reduction = "mean",
    local_size: int | None = None,
) -> Recipe:
    """Measure, and choose each parameter's encoding: as few bytes as keep the error within ``budget``.

    Looks again every so many steps. ``bytes`` is the most that a rank may send in a step, instead of a
    budget. ``ceiling`` is the finest encoding it may use, ``floor`` the coarsest. With ``feedback``, what
    int4 leaves out is sent later.

    >>> auto(ceiling="bf16", every=1000).name
    'auto:every=1000,ceiling=bf16'
    """
    text = format_spec(auto, locals())
    shared: dict[str, Any] = {"reduction": reduction, "local_size": local_size}
    same = {"tables": "same"}
    extra: dict[str, dict[str, Any]] = {"int4": {"feedback": feedback}, "int3": same, "int2": same}
    encodings = tuple(
        (name, RECIPES[name](**shared, **extra.get(name, {})).exchange) for name in between(ceiling, floor)
    )
    tuning = Tuning(budget, bytes, every, log, encodings)
    return Recipe(text, tuning.exchange(), reduction, local_size, tuning=tuning)


RECIPES: dict[str, Callable[..., Recipe]] = {
    factory.__name__: factory
    for factory in (noop, fp32, fp16, bf16, int8, fp8, int4, int3, int2, sign, topk, powersgd, acp, auto)
}


def parse_spec(text: str) -> tuple[Callable[..., Recipe], dict[str, object]] | None:
    """Return the factory that ``text`` names, and the arguments that it gives; None for any other text.

    Raises ValueError for options that the factory does not take.
    """
    name, _, options = text.partition(":")
    factory = RECIPES.get(name)
    return None if factory is None else (factory, parse_options(factory, options))


def spec_with(recipe: Recipe, **options: object) -> str:
    """Return the text of ``recipe`` with these options instead of its own."""
    found = parse_spec(recipe.name)
    if found is None:  # a recipe that the user made of an exchange
        return f"{recipe.name}:{','.join(f'{option}={value}' for option, value in options.items())}"
    factory, given = found
    return format_spec(factory, {**given, **options})
