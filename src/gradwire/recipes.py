"""Recipes: what goes over the wire, as values with names. The only registry."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from gradwire.codecs import Blocks, Cast, Codec, Raw
from gradwire.exchanges import Exchange, Hierarchical, LowRank, Noop, Route, Schedule, Selector, TwoShot
from gradwire.specs import parse_options, spec_of

Reduction = Literal["mean", "sum"]
Residual = Literal["fp32", "bf16"]
Rounding = Literal["nearest", "stochastic"]
Factors = Literal["fp32", "int8", "int4"]
Tables = Literal["same", "fp32", "bf16", "int8", "int4"]

_FACTORS: dict[str, Codec | None] = {"fp32": None, "int8": Blocks("int8", 128), "int4": Blocks("int4", 128)}
_RESIDUALS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Recipe:
    """How a bucket is averaged: which exchange, with which codec, to a mean or a sum.

    >>> recipe("bf16").exchange
    TwoShot(codec=Cast(dtype=torch.bfloat16), feedback=None, seed=0)
    """

    name: str
    """What `recipe` makes this recipe from: a name, and the options that are not as by default."""
    exchange: Exchange
    reduction: Reduction = "mean"
    local_size: int | None = None
    """Ranks in a node, for a recipe in two levels; 1 for one level; None for what the launcher says."""
    tables: Tables = "same"
    """The recipe of parameters over a vocabulary, whose gradients this one would lose: see `apart`."""

    def __post_init__(self) -> None:
        if self.reduction not in typing.get_args(Reduction):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {self.reduction!r}")
        if self.tables not in typing.get_args(Tables):
            allowed = ", ".join(map(repr, typing.get_args(Tables)))
            raise ValueError(f"tables must be one of {allowed}, not {self.tables!r}")

    def __str__(self) -> str:
        return self.name

    def placed(self, local_size: int) -> Recipe:
        """This recipe on nodes of so many ranks; itself if it knows its nodes, or cannot have any."""
        if self.local_size is not None or local_size == 1 or not isinstance(self.exchange, TwoShot):
            return self
        exchange = Hierarchical(self.exchange, local_size)
        return replace(
            self, name=self._name_with("local_size", local_size), exchange=exchange, local_size=local_size
        )

    def apart(self, names: Iterable[str]) -> Recipe:
        """A route that takes the parameters ``names`` by the recipe for tables, and all others by this one.

        Itself if it has none, if there are no such parameters, or if a name cannot stand in a route.

        >>> print(recipe("powersgd").apart(["embed.weight"]))
        route(embed.weight=int4; *=powersgd:tables=same)
        """
        chosen = [name for name in names if not set(name) & set("*?[=;&<>(")]
        if self.tables == "same" or not chosen:
            return self
        nodes = {} if self.local_size is None else {"local_size": self.local_size}
        other = RECIPES[self.tables](reduction=self.reduction, **nodes)
        own = replace(self, name=self._name_with("tables", "same"), tables="same")
        return route({**dict.fromkeys(chosen, other), "*": own})

    def _name_with(self, option: str, value: object) -> str:
        given = re.sub(rf"(?<=[:,]){option}=[^,]*,?", "", self.name).rstrip(":,")
        return f"{given}{',' if ':' in given else ':'}{option}={value}"

    def link_bytes(
        self, numel: int, dtype: torch.dtype = torch.float32, *, rank: int = 0, world_size: int
    ) -> tuple[int, int]:
        """The exact bytes that ``rank`` sends within its node, and through its network card.

        >>> recipe("int8:local_size=8").link_bytes(1 << 20, world_size=16)
        (7340032, 132096)
        >>> recipe("int8").link_bytes(1 << 20, world_size=16)
        (0, 1981440)
        """
        if isinstance(self.exchange, Hierarchical):
            return self.exchange.link_bytes(numel, dtype, rank, world_size)
        return 0, self.wire_bytes(numel, dtype, rank=rank, world_size=world_size)

    def wire_bytes(
        self, numel: int, dtype: torch.dtype = torch.float32, *, rank: int = 0, world_size: int
    ) -> int:
        """The exact number of bytes that ``rank`` sends for a bucket of ``numel`` values.

        >>> recipe("fp32").wire_bytes(1024, world_size=2)
        4096
        >>> recipe("bf16").wire_bytes(1024, world_size=2)
        2048
        """
        return self.exchange.wire_bytes(numel, dtype, rank, world_size)


def noop() -> Recipe:
    """No communication: every rank keeps its own gradients. For measuring only."""
    return Recipe("noop", Noop())


def fp32(reduction: Reduction = "mean", local_size: int | None = 1) -> Recipe:
    """Plain averaging: gradients travel in their own dtype."""
    return _two_shot(fp32, locals(), Raw())


def fp16(reduction: Reduction = "mean", local_size: int | None = None) -> Recipe:
    """fp16 on the wire, each message with its own power-of-two scale; sums in fp32."""
    return _two_shot(fp16, locals(), Cast(torch.float16))


def bf16(reduction: Reduction = "mean", local_size: int | None = None) -> Recipe:
    """bf16 on the wire; sums in fp32."""
    return _two_shot(bf16, locals(), Cast(torch.bfloat16))


def int8(
    block: int = 256,
    feedback: bool = False,
    residual: Residual = "fp32",
    rounding: Rounding = "nearest",
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
) -> Recipe:
    """8-bit integers, with a scale for each block; a quarter of fp32's bytes."""
    return _two_shot(int8, locals(), Blocks("int8", block, rounding == "stochastic"))


def fp8(
    block: int = 256,
    feedback: bool = False,
    residual: Residual = "fp32",
    rounding: Rounding = "nearest",
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
) -> Recipe:
    """8-bit floats (e4m3), with a scale for each block: finer near zero than int8, coarser elsewhere."""
    return _two_shot(fp8, locals(), Blocks("fp8", block, rounding == "stochastic"))


def int4(
    block: int = 128,
    feedback: bool = True,
    residual: Residual = "fp32",
    rounding: Rounding = "nearest",
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
) -> Recipe:
    """4-bit integers, with a scale for each block; what they leave out is sent later."""
    return _two_shot(int4, locals(), Blocks("int4", block, rounding == "stochastic"))


def sign(
    block: int = 512,
    feedback: bool = False,
    residual: Residual = "fp32",
    reduction: Reduction = "mean",
    local_size: int | None = None,
    tables: Tables = "int4",
) -> Recipe:
    """One bit, the sign, and the mean magnitude of each block; parameters over a vocabulary by ``tables``.

    With ``feedback`` what they leave out is sent later: for SGD, not for Adam.
    """
    return _two_shot(sign, locals(), Blocks("sign", block))


def powersgd(
    rank: int = 4,
    start: int = 0,
    min_compression_rate: float = 2.0,
    feedback: bool = True,
    warm_start: bool = True,
    whole: bool = False,
    seed: int = 0,
    reduction: Reduction = "mean",
    tables: Tables = "int4",
    factors: Factors = "fp32",
) -> Recipe:
    """PowerSGD: matrices as two factors of this rank, about a hundredth of fp32's bytes.

    From step ``start`` on; what the factors leave out is sent later. ``whole`` takes a bucket for one matrix.
    Parameters over a vocabulary go by ``tables``. With ``factors`` of 4 bits, eight times the rank costs the
    same bytes, and loses less.
    """
    codec = _factors(factors)
    exchange = LowRank(rank, start, min_compression_rate, feedback, warm_start, seed, whole, factors=codec)
    return Recipe(spec_of(powersgd, locals()), exchange, reduction, tables=tables)


def acp(
    rank: int = 4,
    start: int = 0,
    min_compression_rate: float = 2.0,
    feedback: bool = True,
    seed: int = 0,
    reduction: Reduction = "mean",
    tables: Tables = "int4",
    factors: Factors = "fp32",
) -> Recipe:
    """ACP-SGD: like PowerSGD, but one factor a step, in turns; half the bytes, messages and arithmetic."""
    codec = _factors(factors)
    exchange = LowRank(rank, start, min_compression_rate, feedback, seed=seed, num_rounds=1, factors=codec)
    return Recipe(spec_of(acp, locals()), exchange, reduction, tables=tables)


RECIPES: dict[str, Callable[..., Recipe]] = {
    factory.__name__: factory for factory in (noop, fp32, fp16, bf16, int8, fp8, int4, sign, powersgd, acp)
}


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
        if isinstance(each.exchange, Route | Schedule):
            raise ValueError(f"the stages of a schedule are plain recipes, not {each}")
    if not chosen or min(chosen) != 0:
        raise ValueError(f"a schedule begins with step 0, not {min(chosen, default='without stages')}")
    if len(reductions := {each.reduction for each in chosen.values()}) > 1:
        raise ValueError("the stages of a schedule must reduce alike, and of these some average and some sum")
    name = f"schedule({'; '.join(f'{start}={each}' for start, each in chosen.items())})"
    exchange = Schedule(tuple((start, each.exchange) for start, each in chosen.items()))
    return Recipe(name, exchange, reductions.pop())


def route(routes: Mapping[str, str | Recipe]) -> Recipe:
    """Each parameter by the recipe of the first key that fits it.

    A key is a pattern of names as ``fnmatch`` has it (``"*.norm*"``), a bound on a figure (``"ndim<2"``,
    ``"numel>=65536"``), a shape (``"(50257, *)"``), or several of these with ``&`` between them
    (``"embed.* & numel>65536"``). A key by which no parameter goes, and a parameter without a key, are
    errors of `attach`. As text: ``"route(*.norm*=fp32; numel<=1024=fp32; *=int4)"``. Raises ValueError for
    keys that are none of these, recipes of which some average and some sum, and schedules and routes
    inside.

    >>> print(route({"*.norm*": "fp32", "ndim<2": "fp32", "embed.* & numel>65536": "int8", "*": "int4"}))
    route(*.norm*=fp32; ndim<2=fp32; embed.* & numel>65536=int8; *=int4)
    """
    chosen = {Selector(key): recipe(each) for key, each in routes.items()}
    if not chosen:
        raise ValueError("a route needs at least one pattern, such as '*'")
    for selector, each in chosen.items():
        if isinstance(each.exchange, Route | Schedule):
            raise ValueError(f"the recipe of route {str(selector)!r} must be a plain one, not {each}")
    if len(reductions := {each.reduction for each in chosen.values()}) > 1:
        raise ValueError("the recipes of a route must reduce alike, and of these some average and some sum")
    name = f"route({'; '.join(f'{selector}={each}' for selector, each in chosen.items())})"
    exchange = Route(tuple((selector, each.exchange) for selector, each in chosen.items()))
    return Recipe(name, exchange, reductions.pop())


def _parse_route(spec: str) -> Recipe:
    routes: dict[str, str | Recipe] = {}
    for item in spec.removeprefix("route(").removesuffix(")").split(";"):
        # At the first '=' that is no part of '<=' or '>='.
        key, *rest = (part.strip() for part in re.split("(?<![<>])=", item, maxsplit=1))
        if not rest or key in routes:
            raise ValueError(f"a route is pattern=recipe, each pattern once, not {item.strip()!r}")
        routes[key] = rest[0]
    return route(routes)


def _parse_schedule(spec: str) -> Recipe:
    stages: dict[int, str | Recipe] = {}
    for stage in spec.removeprefix("schedule(").removesuffix(")").split(";"):
        start, equals, each = (part.strip() for part in stage.partition("="))
        if not (equals and start.isdigit()):
            raise ValueError(f"a schedule's stage is step=recipe, as in 1000=int8, not {stage.strip()!r}")
        if int(start) in stages:
            raise ValueError(f"a schedule has one recipe from step {start} on, not two")
        stages[int(start)] = each
    return schedule(stages)


def _factors(name: str) -> Codec | None:
    """What low-rank factors travel as."""
    if name not in _FACTORS:
        raise ValueError(f"factors must be one of {', '.join(map(repr, _FACTORS))}, not {name!r}")
    return _FACTORS[name]


def _two_shot(factory: Callable[..., Recipe], options: dict[str, Any], codec: Codec) -> Recipe:
    """The recipe of a factory, from its arguments."""
    for name, choices in {"residual": Residual, "rounding": Rounding}.items():
        if name in options and options[name] not in typing.get_args(choices):
            allowed = " or ".join(map(repr, typing.get_args(choices)))
            raise ValueError(f"{name} must be {allowed}, not {options[name]!r}")
    feedback = _RESIDUALS[options["residual"]] if options.get("feedback") else None
    flat = TwoShot(codec, feedback, options.get("seed", 0))
    local_size = options["local_size"]
    if local_size is not None and local_size < 1:
        raise ValueError(f"local_size is the number of ranks in a node, not {local_size}")
    is_flat = local_size is None or local_size == 1
    exchange = flat if is_flat else Hierarchical(flat, local_size)
    tables = options.get("tables", "same")
    return Recipe(spec_of(factory, options), exchange, options["reduction"], local_size, tables)


def recipe(spec: str | Recipe) -> Recipe:
    """The recipe that ``spec`` names: ``"bf16"``, or with options ``"fp16:reduction=sum"``.

    Several options are separated by commas: ``"int4:block=64,feedback=false"``. Raises ValueError for a
    name or an option that does not exist, or a value that does not fit.

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
        raise TypeError(f"a recipe is a name or a Recipe, not {type(spec).__name__}")
    if spec.startswith("schedule(") and spec.endswith(")"):
        return _parse_schedule(spec)
    if spec.startswith("route(") and spec.endswith(")"):
        return _parse_route(spec)
    name, _, options = spec.partition(":")
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}{_suggestion(name)} Recipes: {', '.join(RECIPES)}")
    return RECIPES[name](**parse_options(RECIPES[name], options))


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), RECIPES, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
