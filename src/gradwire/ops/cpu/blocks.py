"""Encodings with a scale per block in numba, for fp32 values in host memory.

Values are worked on in tiles that stay in the first-level cache, so that main memory is read and written
once; while a tile is packed, the next one is fetched. Importing this module compiles the kernels, or reads
them from numba's cache on disk.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.packing import pack_bytes, pack_nibbles, pack_signs
from gradwire.ops.cpu.scalars import F4, I4, I8, U1, U2, bf16_to_f32, f32_to_bf16
from gradwire.ops.cpu.unpacking import FP8, INT4, SIGN, unpack
from gradwire.ops.cpu.vectors import LINE, fence, part, span, streams_to, write
from gradwire.ops.formats import KINDS, LIMITS, BlockFormat, Seed

# At least one block. Values, residuals and sums, and those to come, take 20 KiB.
_TILE = 1024
# Larger, for what is only written: 16 KiB, and never less than a block.
_STREAM_TILE = 4096
# What a tile has room for behind its values, see `packing`.
_SPARE = 8


@helper
def _widen(halves: Any, singles: Any) -> None:
    for i in range(halves.size):
        singles[i] = bf16_to_f32(halves[i])


@helper
def _narrow(singles: Any, halves: Any) -> None:
    for i in range(halves.size):
        halves[i] = f32_to_bf16(singles[i])


@helper
def _add(values: Any, factor: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = values[i] * factor
    else:
        for i in range(values.size):
            total[i] += values[i] * factor


@helper
def _add_both(values: Any, residual: Any, factor: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = (values[i] + residual[i]) * factor
    else:
        for i in range(values.size):
            total[i] += (values[i] + residual[i]) * factor


@kernel(
    (
        *(I8, I8, I8, F4, numba.boolean),
        *(U1[::1], U2[::1], I8, I8, I8, F4[::1], I8, F4, F4),
        *(F4[::1], U2[::1], numba.boolean, U1[::1], U2[::1], I4, I4),
        *(F4[::1], U1[::1]),
    )
)
def _reduce(
    kind: Any,
    block: Any,
    per_byte: Any,
    limit: Any,
    dithered: Any,
    rows: Any,
    row_halves: Any,
    num_rows: Any,
    stride: Any,
    first_scale: Any,
    own: Any,
    own_index: Any,
    factor: Any,
    inverse: Any,
    residual: Any,
    residual_halves: Any,
    writes_own: Any,
    codes: Any,
    halves: Any,
    low: Any,
    high: Any,
    scratch: Any,
    nibbles: Any,
) -> None:
    length = max(block, _TILE)
    padded = length + _SPARE
    x, y, z = part(scratch, 0, padded), part(scratch, padded, padded), part(scratch, 2 * padded, padded)
    lanes = part(scratch, 3 * padded, max(block // 8, LINE))
    is_single, is_half = residual.size > 0, residual_halves.size > 0
    keeps = is_single or is_half
    only_codes = not keeps and not writes_own
    for start in range(0, own.size, length):
        size, first, at = min(length, own.size - start), start // block, start // per_byte
        num_codes = min(length // per_byte, codes.size - at)
        num_scales = min(length // block, halves.size - first)
        tile, tile_codes = part(own, start, size), part(codes, at, num_codes)
        tile_halves = part(halves, first, num_scales)
        sent = part(own if writes_own else y, start if writes_own else 0, size)
        # Residuals in bf16 are worked on in scratch; without any, what is left goes there.
        left = part(residual if is_single else z, start if is_single else 0, size)
        next_ = start + size
        coming = part(own, next_, own.size - next_)
        coming_kept = part(residual, next_, residual.size - next_ if is_single else 0)
        # One term that is only read needs no sum; the last tile does, for the sake of what lies behind it.
        as_it_is = num_rows == 1 and not keeps and size == length
        values = part(own if as_it_is else x, start if as_it_is else 0, size)
        if is_half:
            _widen(part(residual_halves, start, size), left)
        for r in range(num_rows):
            if r != own_index:
                row_scales = part(row_halves, r * (stride // 2) + first_scale + first, num_scales)
                unpack(kind, part(rows, r * stride + at, num_codes), size, block, row_scales, y)
                _add(part(y, 0, size), factor, x, r == 0)
            elif keeps:
                _add_both(tile, left, factor, x, r == 0)
            elif not as_it_is:
                _add(tile, factor, x, r == 0)
        for i in range(_SPARE):
            x[size + i] = 0
            nibbles[size + i] = 0
        if kind == SIGN:
            pack_signs(
                only_codes, values, size, block, lanes, tile_codes, tile_halves, sent, left, inverse,
                coming, coming_kept,
            )  # fmt: skip
        else:
            wide = part(nibbles if kind == INT4 else codes, 0 if kind == INT4 else at, size)
            pack_bytes(
                kind == FP8, only_codes, values, size, block, limit, wide, tile_halves, sent, left, inverse,
                coming, coming_kept, dithered, start, low, high,
            )  # fmt: skip
            if kind == INT4:
                pack_nibbles(nibbles, size, block, tile_codes)
        if is_half:
            _narrow(left, part(residual_halves, start, size))


@kernel((I8, I8, I8, U1[::1], U2[::1], F4[::1], numba.boolean, F4[::1]))
def _decode(
    kind: Any, block: Any, per_byte: Any, codes: Any, halves: Any, values: Any, streams: Any, y: Any
) -> None:
    length = _STREAM_TILE
    for start in range(0, values.size, length):
        size, first, at = min(length, values.size - start), start // block, start // per_byte
        tile_halves = part(halves, first, min(length // block, halves.size - first))
        tile_codes = part(codes, at, min(length // per_byte, codes.size - at))
        unpack(kind, tile_codes, size, block, tile_halves, y)
        write(y, part(values, start, size), streams)
    fence()


_NO_VALUES, _NO_HALVES = np.empty(0, np.float32), np.empty(0, np.uint16)
_NO_ROWS = np.empty(0, np.uint8), np.empty(0, np.uint16), 1, 0
_ONE = np.float32(1)


def encode(form: BlockFormat, values: Tensor, residual: Tensor | None, row: Tensor, seed: Seed) -> None:
    # A sum of one term, which is not written back.
    _run(form, _NO_ROWS, values, 0, _ONE, _ONE, residual, row, seed, writes_own=False)


def decode(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    codes, scales = form.split(row, values.numel())
    y = np.empty(_STREAM_TILE + _SPARE, np.float32)
    _decode(*_numbers(form)[:3], codes.numpy(), _halves(scales), values.numpy(), streams_to(values), y)


def reduce(
    form: BlockFormat,
    rows: Tensor,
    own: Tensor,
    own_index: int,
    scale: float | Tensor,
    residual: Tensor | None,
    row: Tensor,
    seed: Seed,
) -> None:
    factors = np.float32(float(scale)), np.float32(1 / float(scale))
    flat = span(rows)
    others = flat.numpy(), _halves(flat), len(rows), rows.stride(0)
    _run(form, others, own, own_index, *factors, residual, row, seed, writes_own=True)


def _run(
    form: BlockFormat,
    rows: tuple[Any, Any, int, int],
    own: Tensor,
    own_index: int,
    factor: Any,
    inverse: Any,
    residual: Tensor | None,
    row: Tensor,
    seed: Seed,
    writes_own: bool,
) -> None:
    codes, scales = form.split(row, own.numel())
    kept, kept_halves = _NO_VALUES, _NO_HALVES
    if residual is not None and residual.dtype == torch.bfloat16:
        kept_halves = _halves(residual)
    elif residual is not None:
        kept = residual.numpy()
    _reduce(
        *_numbers(form),
        *rows,
        form.scales_offset(own.numel()) // 2,
        own.numpy(),
        own_index,
        factor,
        inverse,
        kept,
        kept_halves,
        writes_own,
        codes.numpy(),
        _halves(scales),
        *_words(seed),
        *_scratch(form),
    )


def _numbers(form: BlockFormat) -> tuple[Any, ...]:
    limit = np.float32(LIMITS.get(form.kind, 0.0))
    return KINDS[form.kind], form.block, form.values_per_byte, limit, form.stochastic


def _scratch(form: BlockFormat) -> tuple[Any, Any]:
    """Room for three tiles and the sums of a block, and for a tile of bytes."""
    length = max(form.block, _TILE) + _SPARE
    return np.empty(3 * length + max(form.block // 8, LINE), np.float32), np.empty(length, np.uint8)


def _halves(values: Tensor) -> Any:
    return values.view(torch.uint16).numpy()


def _words(seed: Seed) -> tuple[Any, Any]:
    return np.uint32(seed.low).astype(np.int32), np.uint32(seed.high).astype(np.int32)
