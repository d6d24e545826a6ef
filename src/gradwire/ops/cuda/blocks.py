"""Encodings with a scale per block in Triton, for values in CUDA memory.

A program takes a few blocks, each as planes of values that share their bytes: a tile of shape (place in a
byte, block, byte). Threads are dealt out from the last axis on, so one has all the values of its bytes.
Products are not fused with sums, so that results are those of the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.cuda.codes import from_codes, from_codes_times, scales_of, to_bf16, to_codes
from gradwire.ops.formats import KINDS, LIMITS, BlockFormat, Seed

# How many values one program works on, and with how many warps: the fastest of some twenty pairs on an H200,
# by operation and kind. The worst pair takes up to five times as long.
_TUNED = {
    "encode": {"int8": (1024, 2), "fp8": (2048, 2), "int4": (1024, 1), "sign": (1024, 1)},
    "decode": {"int8": (1024, 4), "fp8": (512, 2), "int4": (1024, 4), "sign": (2048, 8)},
    "reduce": {"int8": (512, 2), "fp8": (256, 1), "int4": (2048, 1), "sign": (2048, 1)},
}

# By default Triton compiles anew for numbers that are 1 or a multiple of 16, and makes the 1 a constant.
_SIZES = ["num_full", "tail", "low", "high", "num_rows", "first_scale", "own_index"]


@triton.jit
def _first_block(num_full, tail, BLOCK: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr):
    """Where this program begins, whether it has ROWS full blocks, and else its block's bytes and values.

    The blocks that are too few for a tile, and the tail, have a program each.
    """
    program, num_whole = tl.program_id(0), num_full // ROWS
    is_whole = program < num_whole
    block = tl.where(is_whole, program * ROWS, num_whole * (ROWS - 1) + program)
    m = tl.where(block < num_full, BLOCK, tail)
    return block.to(tl.int64), is_whole, (m + PLANES - 1) // PLANES, m


@triton.jit
def _places(
    h, m, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where the values, bytes and scales of a tile lie, from its first ones on, and which of them exist."""
    plane = tl.arange(0, PLANES)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    byte = tl.arange(0, WIDTH)[None, None, :]
    if WHOLE:
        has_scale = tl.full((1, ROWS, 1), True, tl.int1)
        has_byte = tl.full((1, ROWS, WIDTH), True, tl.int1)
        exists = tl.full((PLANES, ROWS, WIDTH), True, tl.int1)
    else:
        has_scale = row == 0
        has_byte = has_scale & (byte < h)
        exists = has_byte & (plane * h + byte < m)
    return row * BLOCK + plane * h + byte, exists, row * WIDTH + byte, has_byte, row, has_scale


@triton.jit
def _load_residual(residual, places, exists, KEEPS: tl.constexpr):
    if KEEPS == 2:  # bf16, as integers
        word = tl.load(residual + places, exists, other=0).to(tl.int32) << 16
        return word.to(tl.float32, bitcast=True)
    else:
        return tl.load(residual + places, exists, other=0.0)


@triton.jit
def _store_residual(residual, places, values, exists, KEEPS: tl.constexpr):
    if KEEPS == 2:
        word = to_bf16(values.to(tl.int32, bitcast=True))
        tl.store(residual + places, (word >> 16).to(tl.int16), exists)
    else:
        tl.store(residual + places, values, exists)


@triton.jit
def _read(codes, scales, bytes_, has_byte, row, has_scale, PLANES: tl.constexpr, BITS: tl.constexpr):
    """The codes of a tile, in their lowest bits, and its scales."""
    plane = tl.arange(0, PLANES)[:, None, None]
    word = tl.load(scales + row, has_scale, other=0).to(tl.int32) << 16
    packed = tl.load(codes + bytes_, has_byte, other=0).to(tl.int32)
    return packed >> (plane * BITS), word.to(tl.float32, bitcast=True)


@triton.jit
def _write(
    code, scale, codes, scales, bytes_, has_byte, row, has_scale, PLANES: tl.constexpr, BITS: tl.constexpr
):
    plane = tl.arange(0, PLANES)[:, None, None]
    packed = tl.sum((code & ((1 << BITS) - 1)) << (plane * BITS), axis=0, keep_dims=True)
    tl.store(codes + bytes_, packed.to(tl.uint8), has_byte)
    tl.store(scales + row, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), has_scale)


@triton.jit
def _encode_tile(
    values, residual, codes, scales, block, h, m, low, high, WHOLE: tl.constexpr,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    places, exists, bytes_, has_byte, row, has_scale = _places(h, m, WHOLE, BLOCK, PLANES, WIDTH, ROWS)
    start = block * BLOCK
    x = tl.load(values + start + places, exists, other=0.0).to(tl.float32)
    if KEEPS:
        x += _load_residual(residual + start, places, exists, KEEPS)
    scale = scales_of(x, m, KIND, LIMIT)
    code, sent = to_codes(x, scale, start + places, low, high, KIND, LIMIT, DITHERED, BITS)
    _write(code, scale, codes + block * WIDTH, scales + block, bytes_, has_byte, row, has_scale, PLANES, BITS)
    if KEEPS:
        _store_residual(residual + start, places, x - sent, exists & (scale >= 0), KEEPS)


@triton.jit(do_not_specialize=_SIZES)
def _encode(
    values, residual, codes, scales, num_full, tail, low, high,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, is_whole, h, m = _first_block(num_full, tail, BLOCK, PLANES, ROWS)
    if is_whole:
        _encode_tile(
            values, residual, codes, scales, block, WIDTH, BLOCK, low, high, True,
            KIND, LIMIT, DITHERED, KEEPS, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip
    else:
        _encode_tile(
            values, residual, codes, scales, block, h, m, low, high, False,
            KIND, LIMIT, DITHERED, KEEPS, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip


@triton.jit
def _decode_tile(
    codes, scales, values, block, h, m, WHOLE: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    places, exists, bytes_, has_byte, row, has_scale = _places(h, m, WHOLE, BLOCK, PLANES, WIDTH, ROWS)
    code, scale = _read(codes + block * WIDTH, scales + block, bytes_, has_byte, row, has_scale, PLANES, BITS)
    y = from_codes(code, scale, KIND, BITS)
    tl.store(values + block * BLOCK + places, y.to(values.dtype.element_ty), exists)


@triton.jit(do_not_specialize=_SIZES)
def _decode(
    codes, scales, values, num_full, tail,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, is_whole, h, m = _first_block(num_full, tail, BLOCK, PLANES, ROWS)
    if is_whole:
        _decode_tile(codes, scales, values, block, WIDTH, BLOCK, True, KIND, BLOCK, BITS, PLANES, WIDTH, ROWS)
    else:
        _decode_tile(codes, scales, values, block, h, m, False, KIND, BLOCK, BITS, PLANES, WIDTH, ROWS)


@triton.jit
def _reduce_tile(
    rows, halves, num_rows, stride, first_scale, own, own_index, factor, inverse, residual, codes, scales,
    block, h, m, low, high, WHOLE: tl.constexpr,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    places, exists, bytes_, has_byte, row, has_scale = _places(h, m, WHOLE, BLOCK, PLANES, WIDTH, ROWS)
    start = block * BLOCK
    mine = tl.load(own + start + places, exists, other=0.0).to(tl.float32)
    if KEEPS:
        mine += _load_residual(residual + start, places, exists, KEEPS)
    codes_of_row, scales_of_row = rows + block * WIDTH, halves + first_scale + block
    x = tl.full(mine.shape, -0.0, tl.float32)  # which added to a zero leaves its sign
    for r in range(num_rows):
        if r == own_index:
            x += mine * factor
        else:
            code, scale = _read(codes_of_row, scales_of_row, bytes_, has_byte, row, has_scale, PLANES, BITS)
            x += from_codes_times(code, scale, factor, KIND, BITS)
        # Not from the first row on by a product, which may be more than 32 bits hold.
        codes_of_row += stride
        scales_of_row += stride // 2
    x = tl.where(exists, x, 0.0)
    scale = scales_of(x, m, KIND, LIMIT)
    code, sent = to_codes(x, scale, start + places, low, high, KIND, LIMIT, DITHERED, BITS)
    _write(code, scale, codes + block * WIDTH, scales + block, bytes_, has_byte, row, has_scale, PLANES, BITS)
    tl.store(own + start + places, sent.to(own.dtype.element_ty), exists)
    if KEEPS:
        held = (x - sent) * inverse
        _store_residual(residual + start, places, held, exists & (scale >= 0), KEEPS)


@triton.jit(do_not_specialize=_SIZES)
def _reduce(
    rows, halves, num_rows, stride, first_scale, own, own_index, factors, factor, inverse, residual,
    codes, scales, num_full, tail, low, high,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr, KEEPS: tl.constexpr,
    FACTORS_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if FACTORS_ON_DEVICE:
        factor = tl.load(factors)
        inverse = tl.load(factors + 1)
    block, is_whole, h, m = _first_block(num_full, tail, BLOCK, PLANES, ROWS)
    if is_whole:
        _reduce_tile(
            rows, halves, num_rows, stride, first_scale, own, own_index, factor, inverse, residual,
            codes, scales, block, WIDTH, BLOCK, low, high, True,
            KIND, LIMIT, DITHERED, KEEPS, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip
    else:
        _reduce_tile(
            rows, halves, num_rows, stride, first_scale, own, own_index, factor, inverse, residual,
            codes, scales, block, h, m, low, high, False,
            KIND, LIMIT, DITHERED, KEEPS, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip


def encode(form: BlockFormat, values: Tensor, residual: Tensor | None, row: Tensor, seed: Seed) -> None:
    codes, scales = form.split(row, values.numel())
    grid, sizes, shape = _launch("encode", form, values.numel())
    _encode[grid](
        values,
        values if residual is None else _stored(residual),
        codes,
        scales.view(torch.int16),
        *sizes,
        *_words(seed),
        KEEPS=_keeps(residual),
        **_rounding(form),
        **shape,
    )


def decode(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    codes, scales = form.split(row, values.numel())
    grid, sizes, shape = _launch("decode", form, values.numel())
    _decode[grid](codes, scales.view(torch.int16), values, *sizes, **shape)


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
    codes, scales = form.split(row, own.numel())
    grid, sizes, shape = _launch("reduce", form, own.numel())
    on_device = isinstance(scale, Tensor)
    if isinstance(scale, Tensor):
        wide = scale.to(torch.float64)
        factors, factor, inverse = torch.stack([wide, 1 / wide]).to(torch.float32), 1.0, 1.0
    else:
        factors, factor, inverse = own, scale, 1 / scale
    _reduce[grid](
        rows,
        rows.view(torch.int16),
        len(rows),
        rows.stride(0),
        form.scales_offset(own.numel()) // 2,
        own,
        own_index,
        factors,
        factor,
        inverse,
        own if residual is None else _stored(residual),
        codes,
        scales.view(torch.int16),
        *sizes,
        *_words(seed),
        KEEPS=_keeps(residual),
        FACTORS_ON_DEVICE=on_device,
        **_rounding(form),
        **shape,
    )


def _launch(
    operation: str, form: BlockFormat, numel: int
) -> tuple[tuple[int], tuple[int, int], dict[str, Any]]:
    """How many programs, what they need to know of the run's length, and the shape of their tiles."""
    num_full, tail = divmod(numel, form.block)
    tile, num_warps = _TUNED[operation][form.kind]
    rows = max(tile // form.block, 1)
    shape = {
        "KIND": KINDS[form.kind],
        "BLOCK": form.block,
        "BITS": 8 // form.values_per_byte,
        "PLANES": form.values_per_byte,
        "WIDTH": form.block // form.values_per_byte,
        "ROWS": rows,
        "num_warps": num_warps,
        "enable_fp_fusion": False,
    }
    num_whole, num_single = divmod(num_full, rows)
    return (num_whole + num_single + int(tail > 0),), (num_full, tail), shape


def _rounding(form: BlockFormat) -> dict[str, Any]:
    return {"LIMIT": LIMITS.get(form.kind, 1.0), "DITHERED": form.stochastic}


def _keeps(residual: Tensor | None) -> int:
    return 0 if residual is None else 2 if residual.dtype == torch.bfloat16 else 1


def _stored(residual: Tensor) -> Tensor:
    return residual.view(torch.int16) if residual.dtype == torch.bfloat16 else residual


def _words(seed: Seed) -> tuple[int, int]:
    """As signed numbers, whose bits Triton takes for 32-bit words."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in (seed.low, seed.high))  # type: ignore[return-value]
