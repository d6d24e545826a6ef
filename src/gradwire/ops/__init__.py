"""Kernels over flat tensors: a reference in torch, numba for fp32 values on CPU, Triton on CUDA.

Whatever knows ranks, buckets or messages does not belong here.

`reference` defines the results. The kernels equal it bit for bit, with two exceptions: a NaN may have another
payload, and Triton adds up the mean magnitude of a block of `sign` in its own order.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from gradwire.ops.batches import OTHER, Batch, Batches, Matrix, Side
from gradwire.ops.formats import BlockFormat, Kind, RotatedFormat, Seed
from gradwire.ops.hashes import fill_uniformly
from gradwire.ops.operands import NO_RANK, NO_SEED, Chunk, RotatedRows, Scale, Terms
from gradwire.ops.owner_cache import cached_on_owner
from gradwire.ops.reference import blocks as reference_blocks
from gradwire.ops.reference import casts as reference_casts
from gradwire.ops.reference import low_rank as reference_low_rank
from gradwire.ops.reference import rotated as reference_rotated

__all__ = [
    "NO_RANK",
    "NO_SEED",
    "OTHER",
    "Batch",
    "Batches",
    "BlockFormat",
    "Chunk",
    "Family",
    "Kind",
    "Matrix",
    "RotatedFormat",
    "RotatedRows",
    "Scale",
    "Seed",
    "Side",
    "Terms",
    "absmax",
    "cached_on_owner",
    "cast_scaled",
    "decode_blocks",
    "decode_rotated",
    "encode_blocks",
    "encode_rotated",
    "fill_uniformly",
    "low_rank",
    "reduce_blocks",
    "reduce_rotated",
    "reduce_rows",
    "sum_blocks",
    "sum_rotated",
    "sum_rows",
    "warm_up",
]

Family = Literal["casts", "blocks", "rotated", "low_rank"]
"""Kernels that are compiled together."""

_SLOW_S = 2.0
"""The time after which loading kernels is announced; reading them from the cache takes less."""

log = logging.getLogger("gradwire")

_HALVES = (torch.float16, torch.bfloat16)


def reduce_rows(terms: Terms, encoded: Tensor, up: Scale, down: Scale) -> None:
    """Sum the terms in order, encode the sum, and decode it again to ``terms.own``.

    ``encoded = (sum over r of values[r] * scales[r]) * up``, then ``own = encoded * down``. The values of
    another rank's row have the dtype of ``encoded``. ``encoded`` may be ``own``, for values that travel as
    they are.

    Sums are fp32, or fp64 when ``own`` is fp64. Each product is rounded before it is added, so a sum depends
    neither on a value's position nor on which rank owns it.
    """
    _casts(terms.own, encoded.dtype).reduce_rows(terms, encoded, up, down)


def sum_rows(terms: Terms, dtype: torch.dtype) -> None:
    """Replace ``terms.own`` by the sum of the terms in order; rows hold values of ``dtype``.

    Sums are as in `reduce_rows`, and are not encoded again. With ``own_index=NO_RANK`` rows hold all terms.
    """
    _casts(terms.own, dtype).sum_rows(terms, dtype)


def cast_scaled(values: Tensor, scale: Scale, out: Tensor) -> None:
    """Write ``values * scale`` to ``out``, multiplied in the wider of the two dtypes, at least fp32."""
    if _is_fast(values) and out.dtype in _HALVES:
        _kernels("cpu", "casts").encode(values, scale, out)
    elif _is_fast(out) and values.dtype in _HALVES:
        _kernels("cpu", "casts").decode(values, scale, out)
    else:
        reference_casts.cast_scaled(values, scale, out)


def absmax(values: Tensor) -> Tensor:
    """Return the largest magnitude as a 0-d fp32 tensor; it is not finite if any value is not."""
    result: Tensor = (_kernels("cpu", "casts") if _is_fast(values) else reference_casts).absmax(values)
    return result


def encode_blocks(form: BlockFormat, chunk: Chunk) -> None:
    """Encode ``values + residual`` to the chunk's row, and leave in the residual what the row leaves out.

    A block with a value that is not finite leaves its residual unchanged.
    """
    _blocks(chunk.values).encode(form, chunk)


def decode_blocks(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    """Decode ``row`` to ``values``."""
    _blocks(values).decode(form, row, values)


def reduce_blocks(form: BlockFormat, chunk: Chunk, rows: Tensor, own_index: int, scale: Scale) -> None:
    """Sum ``values[r] * scale`` over r in order, encode the sum, and decode it again to ``chunk.values``.

    ``values[own_index]`` is the chunk's ``values + residual``. The others are encoded in ``rows``, a matrix
    of bytes whose rows may be longer than what they hold. The residual becomes what the chunk's row leaves
    out of the sum, divided by ``scale``.
    """
    _blocks(chunk.values).reduce(form, chunk, rows, own_index, scale)


def sum_blocks(form: BlockFormat, own: Tensor, rows: Tensor, own_index: int, scale: Scale) -> None:
    """Replace ``own`` by the sum of ``values[r] * scale`` over r in order, which is not encoded again.

    ``values[own_index]`` is ``own``. The others are encoded in ``rows``, as for `reduce_blocks`; with
    ``own_index=NO_RANK`` all are.
    """
    _blocks(own).sum_rows(form, own, rows, own_index, scale)


def encode_rotated(form: RotatedFormat, chunk: Chunk) -> None:
    """Rotate the chunk's values by its seed, and encode them to its row."""
    _rotated(chunk.values).encode(form, chunk)


def decode_rotated(form: RotatedFormat, row: Tensor, values: Tensor, seed: Seed) -> None:
    """Decode ``row``, which was rotated by ``seed``, to ``values``."""
    _rotated(values).decode(form, row, values, seed)


def reduce_rotated(
    form: RotatedFormat, chunk: Chunk, terms: RotatedRows, own_index: int, scale: Scale
) -> None:
    """Sum ``values[r] * scale`` over r in order, encode the sum, and decode it again to ``chunk.values``.

    ``values[own_index]`` is the chunk's. The others are encoded in ``terms``.
    """
    _rotated(chunk.values).reduce(form, chunk, terms, own_index, scale)


def sum_rotated(own: Tensor, terms: RotatedRows, own_index: int, scale: Scale) -> None:
    """Replace ``own`` by the sum of ``values[r] * scale`` over r in order, which is not encoded again.

    ``values[own_index]`` is ``own``. The others are encoded in ``terms``; with ``own_index=NO_RANK`` all are.
    """
    _rotated(own).sum_rows(own, terms, own_index, scale)


def low_rank(values: Tensor, work: Tensor) -> ModuleType:
    """Return the kernels for low-rank factors of ``values``, computed in ``work``.

    `reference.low_rank` says what each of them does.
    """
    if _is_fast(values, work):
        return _kernels("cpu", "low_rank")
    return _kernels("cuda", "low_rank") if work.is_cuda and _has_triton() else reference_low_rank


def warm_up(device: torch.device, families: Iterable[Family]) -> None:
    """Compile kernels for ``device`` ahead of their first use, or read them from the cache on disk."""
    names = sorted(families) if device.type == "cpu" else []
    if all(f"{__name__}.cpu.{name}" in sys.modules for name in names):
        return
    told = threading.Timer(_SLOW_S, _tell_compiling, [names])
    told.daemon = True
    told.start()
    try:
        for name in names:
            _kernels("cpu", name)
    finally:
        told.cancel()


def _tell_compiling(names: Sequence[str]) -> None:
    log.warning(
        "gradwire compiles its CPU kernels (%s), which takes some seconds once for each version and machine; "
        "numba keeps them on disk for later runs",
        ", ".join(names),
    )


def _is_fast(*tensors: Tensor) -> bool:
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def _casts(own: Tensor, dtype: torch.dtype) -> ModuleType:
    """Return the kernels for sums of rows of ``dtype``."""
    dtypes = {torch.float32, *_HALVES}
    if _is_fast(own) and dtype in dtypes:
        return _kernels("cpu", "casts")
    is_for_triton = own.is_cuda and _has_triton() and {dtype, own.dtype} <= dtypes
    return _kernels("cuda", "casts") if is_for_triton else reference_casts


def _blocks(values: Tensor) -> ModuleType:
    if _is_fast(values):
        return _kernels("cpu", "blocks")
    return _kernels("cuda", "blocks") if values.is_cuda and _has_triton() else reference_blocks


def _rotated(values: Tensor) -> ModuleType:
    if _is_fast(values):
        return _kernels("cpu", "rotated")
    return _kernels("cuda", "rotated") if values.is_cuda and _has_triton() else reference_rotated


@functools.cache
def _kernels(device: Literal["cpu", "cuda"], family: Family) -> ModuleType:
    # On first use: importing numba takes 0.2 s, which a program that never trains need not spend.
    return importlib.import_module(f"{__name__}.{device}.{family}")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
