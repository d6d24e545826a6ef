"""Recipes composed of others, by step and by parameter, and the parser of recipes as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

from gradwire.exchanges import Route, Schedule, Selector
from gradwire.recipes.registry import parse_spec
from gradwire.recipes.spelling import InvalidRecipeText, recipe_type_error
from gradwire.recipes.value import Recipe


def recipe(spec: str | Recipe) -> Recipe:
    """Return the recipe that ``spec`` names: ``"bf16"``, or with options ``"fp16:reduction=sum"``.

    Separate several options by commas: ``"int4:block=64,feedback=false"``. Raises ValueError for an unknown
    name or option and for a value that does not fit, and TypeError if ``spec`` is neither text nor a recipe.

    >>> print(recipe("fp16:reduction=sum"))
    fp16:reduction=sum
    >>> recipe("bf61")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: there is no recipe 'bf61'; did you mean 'bf16' or 'fp16'? Recipes: noop, fp32, fp16, ...
    """
    if isinstance(spec, Recipe):
        return spec
    if not isinstance(spec, str):
        raise recipe_type_error(spec)
    try:
        return _parse(spec)
    except InvalidRecipeText as error:
        raise error.explain(spec, _parse) from None


def schedule(stages: Mapping[int, str | Recipe]) -> Recipe:
    """Use one recipe after another; ``stages`` maps the first step of each to it, and begins with step 0.

    The next recipe takes over the residuals of the one before, or sends them with its first gradients. As
    text: ``"schedule(0=fp32; 1000=int8; 5000=int4)"``. Raises ValueError if no stage begins with step 0, if
    some recipes average and some sum, or if a stage is itself a schedule or a route. Raises TypeError for
    steps that are not whole numbers, and if ``stages`` is no mapping.

    >>> print(schedule({0: "fp32", 1000: "int8", 5000: "int4:block=64"}))
    schedule(0=fp32; 1000=int8; 5000=int4:block=64)
    """
    _require_mapping(stages, "schedule", '{0: "fp32", 1000: "int8"}')
    for start in stages:
        if isinstance(start, bool) or not isinstance(start, SupportsIndex):
            raise TypeError(f"a stage of a schedule begins with a step, a whole number, not {start!r}")
    chosen = {int(start): recipe(each) for start, each in sorted(stages.items())}
    for each in chosen.values():
        if each.parts:
            raise ValueError(f"a stage of a schedule cannot be a schedule or a route itself: {each}")
    if not chosen:
        raise ValueError("a schedule begins with step 0, and this one has no stages")
    if min(chosen) != 0:
        raise ValueError(f"a schedule begins with step 0, not {min(chosen)}")
    return _compose(Schedule, chosen)


def route(routes: Mapping[str, str | Recipe]) -> Recipe:
    """Average each parameter by the recipe of the first key that fits it.

    A key is one of these, or several joined by ``&`` (``"embed.* & numel>65536"``):

    - a pattern of names, as in ``fnmatch``: ``"*.norm*"``
    - a bound: ``"ndim<2"``, ``"numel>=65536"``
    - a shape: ``"(50257, *)"``

    `attach` raises ValueError for a key that no parameter goes by, and for a parameter that no key fits. As
    text: ``"route(*.norm*=fp32; numel<=1024=fp32; *=int4)"``. A recipe in it may be a schedule. Raises
    ValueError for a key of another form, if some recipes average and some sum, or if a recipe is itself a
    route, and TypeError if ``routes`` is no mapping.

    >>> print(route({"*.norm*": "fp32", "ndim<2": "fp32", "embed.* & numel>65536": "int8", "*": "int4"}))
    route(*.norm*=fp32; ndim<2=fp32; embed.* & numel>65536=int8; *=int4)
    >>> print(recipe("route(ndim<2=fp32; *=schedule(0=int8; 500=int4))"))
    route(ndim<2=fp32; *=schedule(0=int8; 500=int4))
    """
    _require_mapping(routes, "route", '{"ndim<2": "fp32", "*": "int4"}')
    chosen = {Selector(key): recipe(each) for key, each in routes.items()}
    if not chosen:
        raise ValueError("a route needs at least one pattern, such as '*'")
    for selector, each in chosen.items():
        if isinstance(each.exchange, Route):
            raise ValueError(f"the recipe of route {str(selector)!r} is a route itself: {each}")
    return _compose(Route, chosen)


def _require_mapping(given: object, maker: str, example: str) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"gradwire.{maker} takes a dict, such as {example}, not {type(given).__name__}")


def _compose(kind: type[Schedule] | type[Route], chosen: Mapping[Any, Recipe]) -> Recipe:
    """Return the recipe of a schedule or a route, from its recipes by step or selector."""
    name, parts = kind.__name__.lower(), tuple(chosen.items())
    if any(each.tuning is not None for _, each in parts):
        raise ValueError(f"auto chooses by step and by parameter itself, so a {name} cannot contain it")
    if len(reductions := {each.reduction for _, each in parts}) > 1:
        raise ValueError(f"the recipes of a {name} must reduce alike, but some of these average and some sum")
    text = f"{name}({'; '.join(f'{key}={each}' for key, each in parts)})"
    exchanges = tuple((key, each.exchange) for key, each in parts)
    return Recipe(text, kind(exchanges), reductions.pop(), parts=parts)


def map_leaves(whole: Recipe, change: Callable[[Recipe], Recipe]) -> Recipe:
    """Return the same composition with each recipe in it changed."""
    if not whole.parts:
        return change(whole)
    kind = Route if isinstance(whole.exchange, Route) else Schedule
    return _compose(kind, {key: map_leaves(each, change) for key, each in whole.parts})


def merge_stages(whole: Recipe) -> Recipe:
    """Drop each stage of a schedule that equals the one before; return a single stage by itself."""
    recipes = [each for _, each in whole.parts]
    changes = zip(whole.parts, [None, *recipes], strict=False)
    stages = {start: each for (start, each), before in changes if each != before}
    return _compose(Schedule, stages) if len(stages) > 1 else next(iter(stages.values()), whole)


def _parse(spec: str) -> Recipe:
    """Return the recipe of a text; raise `InvalidRecipeText` for the part of it that is no recipe."""
    opened, closed = spec.count("("), spec.count(")")
    if opened != closed:
        raise InvalidRecipeText(f"recipe {spec!r} has {opened} '(' and {closed} ')'", spec)
    for kind, parse in {"schedule(": _parse_schedule, "route(": _parse_route}.items():
        if spec.startswith(kind) and spec.endswith(")"):
            return parse(_split_items(spec[len(kind) : -1]))
    found = parse_spec(spec)
    if found is None:
        raise InvalidRecipeText(f"there is no recipe {spec.partition(':')[0]!r}", spec)
    factory, arguments = found
    try:
        return factory(**arguments)
    except ValueError as error:
        raise ValueError(f"recipe {spec!r}: {error}") from None


def _split_items(text: str) -> list[str]:
    """Split at semicolons, except those inside parentheses: they belong to a recipe within."""
    items: list[str] = []
    for piece in text.split(";"):
        if items and items[-1].count("(") != items[-1].count(")"):
            items[-1] += f";{piece}"
        else:
            items.append(piece)
    return [item.strip() for item in items]


def _parse_schedule(items: list[str]) -> Recipe:
    stages: dict[int, Recipe] = {}
    for item in items:
        start, equals, each = (part.strip() for part in item.partition("="))
        if not (equals and start.isdecimal()):
            raise ValueError(f"a schedule's stage is step=recipe, as in 1000=int8, not {item!r}")
        if int(start) in stages:
            raise ValueError(f"a schedule has one recipe from step {start} on, not two")
        stages[int(start)] = _parse(each)
    return schedule(stages)


def _parse_route(items: list[str]) -> Recipe:
    routes: dict[str, Recipe] = {}
    for item in items:
        # Split at the first '=' that is not part of '<=' or '>='.
        key, *rest = (part.strip() for part in re.split("(?<![<>])=", item, maxsplit=1))
        if not rest or key in routes:
            raise ValueError(f"a route is pattern=recipe, each pattern once, not {item!r}")
        routes[key] = _parse(rest[0])
    return route(routes)
