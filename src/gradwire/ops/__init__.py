"""Kernels over flat tensors: numba for fp32 values on CPU, Triton on CUDA, torch for everything else.

`reference` is the truth. The kernels equal it bit for bit, except that a NaN may differ from another NaN
in its payload, and that Triton adds up the mean of a block in an order of its own.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from gradwire.ops.batches import OTHER, Batch, Batches, Matrix, Side
from gradwire.ops.formats import BlockFormat, Kind, Seed
from gradwire.ops.owner_cache import cached_on_owner
from gradwire.ops.reference import blocks as reference_blocks
from gradwire.ops.reference import casts as reference_casts
from gradwire.ops.reference import low_rank as reference_low_rank

__all__ = [
    "OTHER",
    "Batch",
    "Batches",
    "BlockFormat",
    "Family",
    "Kind",
    "Matrix",
    "Scale",
    "Seed",
    "Side",
    "absmax",
    "cached_on_owner",
    "cast_scaled",
    "decode_blocks",
    "encode_blocks",
    "low_rank",
    "reduce_blocks",
    "reduce_rows",
    "warm_up",
]

Scale = float | Tensor

Family = Literal["casts", "blocks", "low_rank"]
"""Kernels that are compiled together."""

_HALVES = (torch.float16, torch.bfloat16)


def reduce_rows(
    rows: Tensor,
    header_bytes: int,
    own: Tensor,
    own_index: int,
    scales: Sequence[Scale],
    up: Scale,
    down: Scale,
    encoded: Tensor,
) -> None:
    """Sum in order, encode the sum, and decode it again: ``own = encoded * down``.

    ``encoded = (sum over r of values[r] * scales[r]) * up``. ``values[own_index]`` is ``own``; every
    other one lies in ``rows[r]``, a row of bytes, behind a header, in the dtype of ``encoded``. Sums in
    fp32, in fp64 when ``own`` is fp64, with each product rounded before it is added, so that a sum
    depends neither on a value's position nor on who owns it. ``encoded`` may be ``own``, for values that
    travel as they are.
    """
    fast = _fast(own) and encoded.dtype in (torch.float32, *_HALVES)
    kernels = _cpu_casts() if fast else reference_casts
    kernels.reduce_rows(rows, header_bytes, own, own_index, scales, up, down, encoded)


def cast_scaled(values: Tensor, scale: Scale, out: Tensor) -> None:
    """``out = values * scale``, multiplied in the wider of the two dtypes, at least fp32."""
    if _fast(values) and out.dtype in _HALVES:
        _cpu_casts().encode(values, scale, out)
    elif _fast(out) and values.dtype in _HALVES:
        _cpu_casts().decode(values, scale, out)
    else:
        reference_casts.cast_scaled(values, scale, out)


def absmax(values: Tensor) -> Tensor:
    """The largest magnitude as a 0-d fp32 tensor; not finite if any value is not."""
    result: Tensor = (_cpu_casts() if _fast(values) else reference_casts).absmax(values)
    return result


def encode_blocks(
    form: BlockFormat, values: Tensor, residual: Tensor | None, row: Tensor, seed: Seed
) -> None:
    """Write the row of ``values + residual``, and to ``residual`` what the row leaves out.

    A block in which a value is not finite leaves its residual as it was.
    """
    _blocks(values).encode(form, values, residual, row, seed)


def decode_blocks(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    """Write the values of ``row``."""
    _blocks(values).decode(form, row, values)


def reduce_blocks(
    form: BlockFormat,
    rows: Tensor,
    own: Tensor,
    own_index: int,
    scale: Scale,
    residual: Tensor | None,
    row: Tensor,
    seed: Seed,
) -> None:
    """Write the row of the sum over r of ``values[r] * scale``, in order, and decode it to ``own``.

    ``values[own_index]`` is ``own + residual``, the others are encoded in ``rows``, a matrix of bytes
    whose rows may be longer than what they hold. What the row leaves out, divided by ``scale``, goes to
    the residual.
    """
    _blocks(own).reduce(form, rows, own, own_index, scale, residual, row, seed)


def low_rank(values: Tensor, work: Tensor) -> ModuleType:
    """The kernels for low-rank factors of ``values``, taken in ``work``: see `reference.low_rank`."""
    if _fast(values, work):
        return _cpu_low_rank()
    return _cuda_low_rank() if work.is_cuda and _has_triton() else reference_low_rank


def warm_up(device: torch.device, families: Iterable[Family]) -> None:
    """Compile kernels for ``device``, or read them from the cache, before they are needed."""
    load = {"casts": _cpu_casts, "blocks": _cpu_blocks, "low_rank": _cpu_low_rank}
    for family in families if device.type == "cpu" else ():
        load[family]()


def _fast(*tensors: Tensor) -> bool:
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def _blocks(values: Tensor) -> ModuleType:
    if _fast(values):
        return _cpu_blocks()
    return _cuda_blocks() if values.is_cuda and _has_triton() else reference_blocks


# Imported on first use: numba takes 0.2 s, and a program that never trains never needs it.


def _cpu_casts() -> ModuleType:
    from gradwire.ops.cpu import casts

    return casts


def _cpu_blocks() -> ModuleType:
    from gradwire.ops.cpu import blocks

    return blocks


def _cpu_low_rank() -> ModuleType:
    from gradwire.ops.cpu import low_rank

    return low_rank


def _cuda_low_rank() -> ModuleType:
    from gradwire.ops.cuda import low_rank

    return low_rank


def _cuda_blocks() -> ModuleType:
    from gradwire.ops.cuda import blocks

    return blocks


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
