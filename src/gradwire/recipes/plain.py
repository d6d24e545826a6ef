"""Recipes: what goes over the wire, as values with names. The only registry of names."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from gradwire.buckets import BucketLayout, Slot
from gradwire.codecs import Blocks, Cast, Codec, Raw
from gradwire.exchanges import Exchange, Hierarchical, Links, LowRank, Noop, Selector, TwoShot
from gradwire.recipes.option_text import parse_options, spec_of

Reduction = Literal["mean", "sum"]
Residual = Literal["fp32", "bf16"]
Rounding = Literal["nearest", "stochastic"]
Factors = Literal["fp32", "int8", "int4"]
Tables = Literal["same", "fp32", "bf16", "int8", "int4"]

# What factors travel as, and the rank that then sends the bytes of rank 4 in fp32.
_FACTORS: dict[str, tuple[int, Codec | None]] = {
    "fp32": (4, None),
    "int8": (16, Blocks("int8", 128)),
    "int4": (32, Blocks("int4", 128)),
}
_RESIDUALS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Recipe:
    """How a bucket is averaged: which exchange, with which codec, to a mean or a sum.

    >>> bf16().exchange
    TwoShot(codec=Cast(dtype=torch.bfloat16), feedback=None, seed=0)
    """

    name: str
    """What `recipe` makes this recipe from: a name, and the options that are not as by default."""
    exchange: Exchange
    reduction: Reduction = "mean"
    local_size: int | None = None
    """Ranks in a node, for a recipe in two levels; 1 for one level; None for what the launcher says."""
    tables: Tables = "same"
    """The recipe of parameters over a vocabulary, whose gradients this one would lose: see `route_tables`."""
    parts: tuple[tuple[int | Selector, Recipe], ...] = field(default=(), repr=False)
    """Of a schedule its recipes by first step, of a route by parameter; a plain recipe has none."""

    def __post_init__(self) -> None:
        if self.reduction not in typing.get_args(Reduction):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {self.reduction!r}")
        if self.tables not in typing.get_args(Tables):
            allowed = ", ".join(map(repr, typing.get_args(Tables)))
            raise ValueError(f"tables must be one of {allowed}, not {self.tables!r}")

    def __str__(self) -> str:
        return self.name

    def with_node_size(self, local_size: int) -> Recipe:
        """This plain recipe on nodes of so many ranks; itself if it knows its nodes, or cannot have any."""
        if self.local_size is not None or local_size == 1 or not isinstance(self.exchange, TwoShot):
            return self
        exchange = Hierarchical(self.exchange, local_size)
        return replace(
            self, name=self._name_with("local_size", local_size), exchange=exchange, local_size=local_size
        )

    def plain(self) -> Iterator[Recipe]:
        """Each recipe without parts in this one: of a schedule or a route those in it, else itself."""
        if not self.parts:
            yield self
        for _, each in self.parts:
            yield from each.plain()

    def for_tables(self) -> Recipe:
        """What parameters over a vocabulary go by."""
        if self.tables == "same":
            return self
        nodes = {} if self.local_size is None else {"local_size": self.local_size}
        return RECIPES[self.tables](reduction=self.reduction, **nodes)

    def for_others(self) -> Recipe:
        """What all other parameters go by: this recipe, which then takes tables like all else."""
        if self.tables == "same":
            return self
        return replace(self, name=self._name_with("tables", "same"), tables="same")

    def _name_with(self, option: str, value: object) -> str:
        name, _, given = self.name.partition(":")
        if name not in RECIPES:  # of somebody's own exchange
            return f"{self.name}:{option}={value}"
        return spec_of(RECIPES[name], {**parse_options(RECIPES[name], given), option: value})

    def link_bytes(
        self, numel: int, dtype: torch.dtype = torch.float32, *, rank: int = 0, world_size: int
    ) -> Links:
        """`wire_bytes`, those to ranks of its own node and those through its network card.

        A recipe in one level knows of no nodes: all of its bytes count as the card's.

        >>> int8(local_size=8).link_bytes(1 << 20, world_size=16)
        Links(within=7340032, across=132096)
        >>> int8().link_bytes(1 << 20, world_size=16)
        Links(within=0, across=1981440)
        """
        if self.exchange.sees_parameters:
            raise ValueError(
                f"what {self} sends depends on the parameters in a bucket, not on how many values it has: "
                "attach it to a model, and see wire.plan()"
            )
        values = Slot("values", 0, torch.Size([numel]), (1,))
        layout = BucketLayout.packed(0, dtype, [values])
        sent = [self.exchange.link_bytes(layout, world_size, step)[rank] for step in self.exchange.starts]
        return max(sent, key=sum)

    def wire_bytes(
        self, numel: int, dtype: torch.dtype = torch.float32, *, rank: int = 0, world_size: int
    ) -> int:
        """The exact number of bytes that ``rank`` sends for a bucket of ``numel`` values, in each step.

        Where stages of a run differ, in the one that sends most; without votes on parameters that may be
        unused. Raises ValueError where it matters of which parameters the values are, in a route and for
        low rank, which goes by shapes: `Wire.plan` tells theirs.

        >>> fp32().wire_bytes(1024, world_size=2)
        4096
        >>> bf16().wire_bytes(1024, world_size=2)
        2048
        """
        return sum(self.link_bytes(numel, dtype, rank=rank, world_size=world_size))


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

    With ``feedback`` what they leave out is sent later, which did not train better: see docs/fidelity.md.
    """
    return _two_shot(sign, locals(), Blocks("sign", block))


def powersgd(
    rank: int | None = None,
    start: int = 0,
    min_compression_rate: float = 2.0,
    feedback: bool = True,
    warm_start: bool = True,
    whole: bool = False,
    seed: int = 0,
    reduction: Reduction = "mean",
    tables: Tables = "int4",
    factors: Factors | None = None,
) -> Recipe:
    """PowerSGD: matrices as two factors, of rank 32 in int4, or of your rank in fp32; 1/70 of fp32's bytes.

    From step ``start`` on; what the factors leave out is sent later. ``whole`` takes a bucket for one matrix.
    Parameters over a vocabulary go by ``tables``. ``factors`` tells what they travel as; without ``rank`` it
    is the one that sends the bytes of rank 4 in fp32: many coarse directions lose less than few exact ones.
    """
    size, codec = _factors(rank, factors)
    exchange = LowRank(size, start, min_compression_rate, feedback, warm_start, seed, whole, factors=codec)
    return Recipe(spec_of(powersgd, locals()), exchange, reduction, tables=tables)


def acp(
    rank: int | None = None,
    start: int = 0,
    min_compression_rate: float = 2.0,
    feedback: bool = True,
    seed: int = 0,
    reduction: Reduction = "mean",
    tables: Tables = "int4",
    factors: Factors | None = None,
) -> Recipe:
    """ACP-SGD: like PowerSGD, but one factor a step, in turns; half the bytes, messages and arithmetic."""
    size, codec = _factors(rank, factors)
    exchange = LowRank(size, start, min_compression_rate, feedback, seed=seed, num_rounds=1, factors=codec)
    return Recipe(spec_of(acp, locals()), exchange, reduction, tables=tables)


RECIPES: dict[str, Callable[..., Recipe]] = {
    factory.__name__: factory for factory in (noop, fp32, fp16, bf16, int8, fp8, int4, sign, powersgd, acp)
}


def _factors(rank: int | None, name: str | None) -> tuple[int, Codec | None]:
    """The rank of low-rank factors, and what they travel as: by default many coarse directions."""
    if name is None:
        name = "int4" if rank is None else "fp32"
    if name not in _FACTORS:
        raise ValueError(f"factors must be one of {', '.join(map(repr, _FACTORS))}, not {name!r}")
    usual, codec = _FACTORS[name]
    return usual if rank is None else rank, codec


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
