"""Recipes composed of others, by step and by parameter; and text that becomes a recipe of any kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradwire.exchanges import Route, Schedule, Selector
from gradwire.recipes.option_text import parse_options
from gradwire.recipes.plain import RECIPES, Recipe
from gradwire.recipes.spelling import Misspelt, no_recipe


def schedule(stages: Mapping[int, str | Recipe]) -> Recipe:
    """One recipe after another: ``stages`` has the first step of each, the first of them 0.

    What a recipe has held back is taken over by the next, or sent with its first gradients. As text:
    ``"schedule(0=fp32; 1000=int8; 5000=int4)"``. Raises ValueError for stages that do not begin with step
    0, of which some average and some sum, or that are schedules or routes themselves.

    >>> print(schedule({0: "fp32", 1000: "int8", 5000: "int4:block=64"}))
    schedule(0=fp32; 1000=int8; 5000=int4:block=64)
    """
    chosen = {int(start): recipe(each) for start, each in sorted(stages.items())}
    for each in chosen.values():
        if each.parts:
            raise ValueError(f"the stages of a schedule are plain recipes, not {each}")
    if not chosen or min(chosen) != 0:
        raise ValueError(f"a schedule begins with step 0, not {min(chosen, default='without stages')}")
    return _compose(Schedule, chosen)


def route(routes: Mapping[str, str | Recipe]) -> Recipe:
    """Each parameter by the recipe of the first key that fits it.

    A key is a pattern of names as ``fnmatch`` has it (``"*.norm*"``), a bound on a figure (``"ndim<2"``,
    ``"numel>=65536"``), a shape (``"(50257, *)"``), or several of these with ``&`` between them
    (``"embed.* & numel>65536"``). A key by which no parameter goes, and a parameter without a key, are
    errors of `attach`. As text: ``"route(*.norm*=fp32; numel<=1024=fp32; *=int4)"``; a recipe in it may be
    a schedule. Raises ValueError for keys that are none of these, recipes of which some average and some
    sum, and routes inside.

    >>> print(route({"*.norm*": "fp32", "ndim<2": "fp32", "embed.* & numel>65536": "int8", "*": "int4"}))
    route(*.norm*=fp32; ndim<2=fp32; embed.* & numel>65536=int8; *=int4)
    >>> print(recipe("route(ndim<2=fp32; *=schedule(0=int8; 500=int4))"))
    route(ndim<2=fp32; *=schedule(0=int8; 500=int4))
    """
    chosen = {Selector(key): recipe(each) for key, each in routes.items()}
    if not chosen:
        raise ValueError("a route needs at least one pattern, such as '*'")
    for selector, each in chosen.items():
        if isinstance(each.exchange, Route):
            raise ValueError(f"the recipe of route {str(selector)!r} is a route itself: {each}")
    return _compose(Route, chosen)


def _compose(kind: type[Schedule] | type[Route], chosen: Mapping[Any, Recipe]) -> Recipe:
    """A schedule's or a route's recipe, from its parts."""
    name, parts = kind.__name__.lower(), tuple(chosen.items())
    if len(reductions := {each.reduction for _, each in parts}) > 1:
        raise ValueError(f"the recipes of a {name} must reduce alike, and of these some average and some sum")
    text = f"{name}({'; '.join(f'{key}={each}' for key, each in parts)})"
    exchanges = tuple((key, each.exchange) for key, each in parts)
    return Recipe(text, kind(exchanges), reductions.pop(), parts=parts)


def _with_each(changed: Recipe, change: Callable[[Recipe], Recipe]) -> Recipe:
    """The same composition of other plain recipes."""
    if not changed.parts:
        return change(changed)
    kind = Route if isinstance(changed.exchange, Route) else Schedule
    return _compose(kind, {key: _with_each(each, change) for key, each in changed.parts})


def with_node_size(whole: Recipe, local_size: int) -> Recipe:
    """``whole`` on nodes of so many ranks: each recipe in it as it is alone.

    >>> print(with_node_size(schedule({0: "fp32", 9: "int4"}), local_size=8))
    schedule(0=fp32; 9=int4:local_size=8)
    """
    return _with_each(whole, lambda each: each.with_node_size(local_size))


def route_tables(whole: Recipe, names: Iterable[str]) -> Recipe:
    """A route that takes the parameters ``names`` by the recipe for tables, and all others by ``whole``.

    Itself if it has none, if there are no such parameters, or if a name cannot stand in a route. Of a
    schedule, each stage as it is alone. A route says itself what goes how.

    >>> print(route_tables(recipe("powersgd"), ["embed.weight"]))
    route(embed.weight=int4; *=powersgd:tables=same)
    >>> print(route_tables(recipe("schedule(0=int4; 9=sign)"), ["embed.weight"]))
    route(embed.weight=int4; *=schedule(0=int4; 9=sign:tables=same))
    """
    chosen = [name for name in names if not set(name) & set("*?[=;&<>()")]
    is_same = all(each.tables == "same" for each in whole.plain())
    if not chosen or is_same or isinstance(whole.exchange, Route):
        return whole
    tables = _merged(_with_each(whole, Recipe.for_tables))
    return route({**dict.fromkeys(chosen, tables), "*": _with_each(whole, Recipe.for_others)})


def _merged(whole: Recipe) -> Recipe:
    """A schedule without stages that are like the one before; a single stage by itself."""
    recipes = [each for _, each in whole.parts]
    changes = zip(whole.parts, [None, *recipes], strict=False)
    stages = {start: each for (start, each), before in changes if each != before}
    return _compose(Schedule, stages) if len(stages) > 1 else next(iter(stages.values()), whole)


def recipe(spec: str | Recipe) -> Recipe:
    """The recipe that ``spec`` names: ``"bf16"``, or with options ``"fp16:reduction=sum"``.

    Several options are separated by commas: ``"int4:block=64,feedback=false"``. Raises ValueError for a
    name or an option that does not exist, or a value that does not fit, and TypeError for what is no text.

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
        raise no_recipe(spec)
    try:
        return _parse(spec)
    except Misspelt as error:
        raise error.explain(spec, _parse) from None


def _parse(spec: str) -> Recipe:
    """The recipe of a text; raises `Misspelt` for a part of it that is none."""
    opened, closed = spec.count("("), spec.count(")")
    if opened != closed:
        raise Misspelt(f"recipe {spec!r} has {opened} '(' and {closed} ')'", spec)
    for kind, parse in {"schedule(": _parse_schedule, "route(": _parse_route}.items():
        if spec.startswith(kind) and spec.endswith(")"):
            return parse(_items(spec[len(kind) : -1]))
    name, _, options = spec.partition(":")
    if name not in RECIPES:
        raise Misspelt(f"there is no recipe {name!r}", spec)
    return RECIPES[name](**parse_options(RECIPES[name], options))


def _items(text: str) -> list[str]:
    """What stands between semicolons; those within parentheses belong to a recipe inside."""
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
        if not (equals and start.isdigit()):
            raise ValueError(f"a schedule's stage is step=recipe, as in 1000=int8, not {item!r}")
        if int(start) in stages:
            raise ValueError(f"a schedule has one recipe from step {start} on, not two")
        stages[int(start)] = _parse(each)
    return schedule(stages)


def _parse_route(items: list[str]) -> Recipe:
    routes: dict[str, Recipe] = {}
    for item in items:
        # At the first '=' that is no part of '<=' or '>='.
        key, *rest = (part.strip() for part in re.split("(?<![<>])=", item, maxsplit=1))
        if not rest or key in routes:
            raise ValueError(f"a route is pattern=recipe, each pattern once, not {item!r}")
        routes[key] = _parse(rest[0])
    return route(routes)
