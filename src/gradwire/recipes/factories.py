"""A factory for each recipe with a fixed encoding."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, Literal

import torch

from gradwire.codecs import Blocks, Cast, Codec, Raw, Rotated, Top
from gradwire.exchanges import Hierarchical, LowRank, Noop, TwoShot
from gradwire.recipes.option_text import format_spec
from gradwire.recipes.value import Recipe, Reduction, Tables

Residual = Literal["fp32", "bf16"]
Rounding = Literal["nearest", "stochastic"]
Factors = Literal["fp32", "int8", "int8+int4", "int4", "int2"]
Within = Literal["fp32", "same"]
Bits = Literal["1+2", "2+2"]

# The default rank of low-rank factors, their codec, and that of their leading vectors if it is another. Each
# of these ranks sends about the bytes of rank 4 in fp32.
_FACTORS: dict[str, tuple[int, Codec | None, Codec | None]] = {
    "fp32": (4, None, None),
    "int8": (16, Blocks("int8", 128), None),
    "int8+int4": (32, Blocks("int4", 128), Blocks("int8", 128)),
    "int4": (32, Blocks("int4", 128), None),
    "int2": (64, Rotated(2, 128), None),
}
_RESIDUALS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def noop() -> Recipe:
    """Send nothing: every rank keeps its own gradients. For measurements only.

    >>> noop().wire_bytes(1000, world_size=2)
    0
    """
    return Recipe("noop", Noop())


def fp32(reduction: Reduction = "mean", local_size: int | None = 1) -> Recipe:
    """Average without compression: gradients travel in their own dtype.

    >>> fp32().wire_bytes(1000, world_size=2)
    4000
    """
    return _two_shot(fp32, locals(), Raw)


def fp16(reduction: Reduction = "mean", local_size: int | None = None, within: Within = "fp32") -> Recipe:
    """Send fp16, each message with its own power-of-two scale; sum in fp32.

    >>> fp16(reduction="sum").name
    'fp16:reduction=sum'
    """
    return _two_shot(fp16, locals(), Cast, torch.float16)


def bf16(reduction: Reduction = "mean", local_size: int | None = None, within: Within = "fp32") -> Recipe:
    """Send bf16; sum in fp32.

    >>> bf16().wire_bytes(1000, world_size=2)
    2000
    """
    return _two_shot(bf16, locals(), Cast, torch.bfloat16)


def int8(
    block: int = 256,
    feedback: bool = False,
    residual: Residual = "fp32",
    rounding: Rounding = "nearest",
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
    within: Within = "fp32",
) -> Recipe:
    """Send 8-bit integers with a scale for each block: a quarter of fp32's bytes.

    >>> int8(block=128, rounding="stochastic").name
    'int8:block=128,rounding=stochastic'
    """
    return _two_shot(int8, locals(), Blocks, "int8", block, rounding == "stochastic")


def fp8(
    block: int = 256,
    feedback: bool = False,
    residual: Residual = "fp32",
    rounding: Rounding = "nearest",
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
    within: Within = "fp32",
) -> Recipe:
    """Send 8-bit floats (e4m3) with a scale for each block: finer than int8 near zero, coarser elsewhere.

    >>> fp8().wire_bytes(1024, world_size=2)
    1032
    """
    return _two_shot(fp8, locals(), Blocks, "fp8", block, rounding == "stochastic")


def int4(
    block: int | None = None,
    feedback: bool = True,
    residual: Residual = "fp32",
    rounding: Rounding = "nearest",
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
    within: Within = "fp32",
    momentum: float = 0.0,
    rotated: bool = False,
) -> Recipe:
    """Send 4-bit integers with a scale for each block; error feedback sends the rest later.

    With ``rotated``, blocks are rotated at random, as those of `int2` are, which leaves half of the squared
    error. Blocks have 128 values, and 1024 if rotated. With ``momentum``, ranks apply it before they send, as
    `topk` does: give the optimizer none.

    >>> int4(feedback=False).name
    'int4:feedback=false'
    """
    if rotated and rounding == "stochastic":
        raise ValueError("rotated values are rounded to the nearest level: leave rounding or rotated out")
    block = _unless_default(block, 1024 if rotated else 128)
    if rotated:
        return _two_shot(int4, locals(), Rotated, 4, 1024 if block is None else block)
    return _two_shot(
        int4, locals(), Blocks, "int4", 128 if block is None else block, rounding == "stochastic"
    )


def int3(
    block: int = 1024,
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
    within: Within = "fp32",
    tables: Tables = "int4",
) -> Recipe:
    """Rotate blocks at random, and send 3 bits per value; send tables by recipe ``tables``.

    >>> int3(tables="bf16").name
    'int3:tables=bf16'
    """
    return _two_shot(int3, locals(), Rotated.of, 3, 3, block)


def int2(
    block: int = 1024,
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
    within: Within = "fp32",
    tables: Tables = "int4",
    bits: Bits = "2+2",
) -> Recipe:
    """Rotate blocks at random, and send 2 bits per value; send tables by recipe ``tables``.

    ``bits`` is how many a value takes on its way to the rank that sums it, and how many the sum takes.

    >>> int2(bits="1+2").name
    'int2:bits=1+2'
    """
    if bits not in typing.get_args(Bits):
        raise ValueError(f"bits must be one of {', '.join(map(repr, typing.get_args(Bits)))}, not {bits!r}")
    worker, owner = map(int, bits.split("+"))
    return _two_shot(int2, locals(), Rotated.of, worker, owner, block)


def sign(
    block: int | None = None,
    feedback: bool = False,
    residual: Residual = "fp32",
    seed: int = 0,
    reduction: Reduction = "mean",
    local_size: int | None = None,
    within: Within = "fp32",
    tables: Tables = "int4",
    rotated: bool = True,
) -> Recipe:
    """Rotate blocks at random, and send the sign of each value; send tables by recipe ``tables``.

    Each block has one magnitude. Blocks have 1024 values, and 512 with ``rotated=False``, which loses more
    and computes less. With ``feedback``, the rest is sent later; without the rotation
    that trained worse: see docs/fidelity-defaults.md.

    >>> sign(rotated=False).name
    'sign:rotated=false'
    """
    block = _unless_default(block, 1024 if rotated else 512)
    if rotated:
        return _two_shot(sign, locals(), Rotated.of, 1, 1, 1024 if block is None else block)
    return _two_shot(sign, locals(), Blocks, "sign", 512 if block is None else block)


def topk(
    keep: int = 32,
    block: int = 1024,
    feedback: bool = True,
    residual: Residual = "fp32",
    reduction: Reduction = "mean",
    local_size: int | None = None,
    tables: Tables = "int4",
    momentum: float = 0.0,
) -> Recipe:
    """Send the largest values of each block, in 4 bits with their places; feedback sends the others later.

    For SGD and for outer optimizers. With AdamW it trains badly. Send tables by recipe ``tables``. With
    ``momentum``, ranks apply it before they choose values, which trains better: give the optimizer none.

    >>> topk(keep=16, momentum=0.9).name
    'topk:keep=16,momentum=0.9'
    """
    if momentum and tables not in ("int4", "same"):
        raise ValueError(f"with momentum, tables must be 'int4' or 'same', which apply it, not {tables!r}")
    return _two_shot(topk, locals(), Top, keep, block)


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
    """PowerSGD: send matrices as two low-rank factors, from step ``start`` on; bytes depend on their sizes.

    By default factors have rank 32 and travel as int4: many coarse directions lose less than few exact
    ones. With a ``rank``, they travel as fp32. ``factors`` chooses how they travel; its default rank then
    sends about the bytes of rank 4 in fp32. With ``factors="int8+int4"`` an eighth of the directions, which
    hold most of a matrix, travel as int8. Error feedback sends the rest later. Tables go by recipe
    ``tables``. ``whole`` takes a bucket for one matrix.

    >>> powersgd(rank=4, start=1000).name
    'powersgd:rank=4,start=1000'
    """
    text = format_spec(powersgd, locals())
    options = _factor_options(rank, factors)
    exchange = LowRank(
        start=start,
        min_compression_rate=min_compression_rate,
        feedback=feedback,
        warm_start=warm_start,
        seed=seed,
        whole=whole,
        **options,
    )
    return Recipe(text, exchange, reduction, tables=tables)


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
    """ACP-SGD: like PowerSGD with one factor per step, in turns; half the bytes, messages and arithmetic.

    >>> acp(factors="int8").name
    'acp:factors=int8'
    """
    text = format_spec(acp, locals())
    options = _factor_options(rank, factors)
    exchange = LowRank(
        start=start,
        min_compression_rate=min_compression_rate,
        feedback=feedback,
        seed=seed,
        num_rounds=1,
        **options,
    )
    return Recipe(text, exchange, reduction, tables=tables)


def _factor_options(rank: int | None, name: str | None) -> dict[str, Any]:
    """Return the rank of low-rank factors and the codecs that they travel by."""
    if name is None:
        name = "int4" if rank is None else "fp32"
    if name not in _FACTORS:
        raise ValueError(f"factors must be one of {', '.join(map(repr, _FACTORS))}, not {name!r}")
    default_rank, codec, leading = _FACTORS[name]
    return {"rank": default_rank if rank is None else rank, "factors": codec, "leading": leading}


def _unless_default(block: int | None, default: int) -> int | None:
    """Return None for the default, so that a recipe has one name however its block was given."""
    return None if block == default else block


def _two_shot(
    factory: Callable[..., Recipe], options: dict[str, Any], codec: Callable[..., Codec], *of_codec: object
) -> Recipe:
    """Return the recipe of ``factory`` for its arguments ``options``, with a ``codec`` of ``of_codec``.

    The codec is made here, when the arguments are known to be of the right types.
    """
    text = format_spec(factory, options)
    for name, choices in {"residual": Residual, "rounding": Rounding, "within": Within}.items():
        if name in options and options[name] not in typing.get_args(choices):
            allowed = " or ".join(map(repr, typing.get_args(choices)))
            raise ValueError(f"{name} must be {allowed}, not {options[name]!r}")
    feedback = _RESIDUALS[options["residual"]] if options.get("feedback") else None
    flat = TwoShot(codec(*of_codec), feedback, options.get("seed", 0), options.get("momentum", 0.0))
    local_size = options["local_size"]
    if local_size is not None and local_size < 1:
        raise ValueError(f"local_size is the number of ranks in a node, not {local_size}")
    is_flat = local_size is None or local_size == 1
    exchange = flat if is_flat else Hierarchical(flat, local_size, options.get("within") == "same")
    tables = options.get("tables", "same")
    return Recipe(text, exchange, options["reduction"], local_size, tables)
