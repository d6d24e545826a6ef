"""Encodings with a scale per block in Triton, for values in CUDA memory.

A program takes a few blocks, each as planes of values that share their bytes: a tile of shape (block, place
in a byte, byte). Products are not fused with sums, so that results are those of the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.formats import KINDS, LIMITS, MIN_SCALE, BlockFormat, Seed

_SIGN = tl.constexpr(KINDS["sign"])
_FP8 = tl.constexpr(KINDS["fp8"])
_INFINITY = tl.constexpr(0x7F800000)
_LARGEST_BF16 = tl.constexpr(0x7F7F0000)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_ROUND = tl.constexpr(1.5 * 2**23)
_ABS = tl.constexpr(0x7FFFFFFF)

# How many values one program works on, and with how many warps: the fastest of nine pairs on an H200, by
# operation and kind. The worst pair takes up to five times as long.
_TUNED = {
    "encode": {"int8": (1024, 1), "fp8": (1024, 1), "int4": (1024, 4), "sign": (2048, 2)},
    "decode": {"int8": (512, 1), "fp8": (1024, 4), "int4": (1024, 4), "sign": (1024, 4)},
    "reduce": {"int8": (1024, 2), "fp8": (512, 1), "int4": (1024, 4), "sign": (2048, 4)},
}

# By default Triton compiles anew for numbers that are 1 or a multiple of 16, and makes the 1 a constant.
_SIZES = ["num_full", "tail", "low", "high", "num_rows", "first_scale", "own_index"]


@triton.jit
def _offsets(
    h, m, num_blocks, BLOCK: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Where the values and bytes of a tile lie, from its first ones on, and which of them exist.

    A block has ``m`` values in ``h`` bytes; there are ``num_blocks`` of them.
    """
    row = tl.arange(0, ROWS)[:, None, None]
    plane = tl.arange(0, PLANES)[None, :, None]
    byte = tl.arange(0, WIDTH)[None, None, :]
    exists = (row < num_blocks) & (byte < h) & (plane * h + byte < m)
    return row * BLOCK + plane * h + byte, row * WIDTH + byte, exists, (row < num_blocks) & (byte < h)


@triton.jit
def _to_bf16(word):
    """The bits of an fp32 rounded to bf16, to nearest, ties to even, in the place of its higher half."""
    return (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000


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
        word = _to_bf16(values.to(tl.int32, bitcast=True))
        tl.store(residual + places, (word >> 16).to(tl.int16), exists)
    else:
        tl.store(residual + places, values, exists)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(index, low, high):
    """24 random bits for each index."""
    mixed = _mix(_mix(index.to(tl.uint32) ^ low.to(tl.uint32)) + high.to(tl.uint32))
    return (mixed >> 8).to(tl.int32)


@triton.jit
def _scales(x, m, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """The scale of each block of the tile ``x``, of shape (block, 1, 1)."""
    magnitude = x.to(tl.int32, bitcast=True) & _ABS
    largest = tl.max(tl.max(magnitude, axis=2, keep_dims=True), axis=1, keep_dims=True)
    if KIND == _SIGN:
        part = tl.div_rn(1.0, tl.cast(m, tl.float32))
        mean = tl.sum(tl.sum(tl.abs(x) * part, axis=1, keep_dims=True), axis=2, keep_dims=True)
        # Not beyond the largest finite number.
        word = _to_bf16(mean.to(tl.int32, bitcast=True))
        scale = tl.minimum(word, _LARGEST_BF16).to(tl.float32, bitcast=True)
    else:
        quotient = tl.div_rn(largest.to(tl.float32, bitcast=True), LIMIT)
        up = (quotient.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        scale = tl.maximum(up.to(tl.float32, bitcast=True), _MIN_SCALE)
        scale = tl.where(largest == 0, 0.0, scale)
    return tl.where(largest < _INFINITY, scale, float("nan"))


@triton.jit
def _to_fp8(y, noise, DITHERED: tl.constexpr):
    word = y.to(tl.int32, bitcast=True)
    magnitude = word & _ABS
    steps = magnitude.to(tl.float32, bitcast=True) * 512.0
    if DITHERED:
        normal = ((magnitude + (noise >> 4)) >> 20) - (120 << 3)
        steps += noise.to(tl.float32) * (2.0**-24) - 0.5
    else:
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (steps + _ROUND).to(tl.int32, bitcast=True) & 0xF
    code = tl.minimum(tl.where(magnitude < (121 << 23), subnormal, normal), 0x7E)
    return code | ((word >> 24) & 0x80)


@triton.jit
def _from_codes(code, scale, KIND: tl.constexpr, BITS: tl.constexpr):
    """Values from codes, whose higher bits do not matter."""
    if KIND == _SIGN:
        return tl.where((code & 1) == 1, -scale, scale)
    elif KIND == _FP8:
        # The bits of e4m3 in those of fp32 make a number 2^-120 times as large.
        tiny = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        return tiny * (2.0**120) * scale
    else:
        signed = (code << (32 - BITS)) >> (32 - BITS)
        return signed.to(tl.float32) * scale


@triton.jit
def _to_codes(x, scale, index, low, high, KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr):
    if KIND == _SIGN:
        return tl.where((x.to(tl.int32, bitcast=True) < 0) & (scale > 0), 1, 0)
    else:
        y = x * tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
        noise = tl.zeros_like(y).to(tl.int32)
        if DITHERED:
            noise = _noise(index, low, high)
        if KIND == _FP8:
            return _to_fp8(y, noise, DITHERED)
        else:
            if DITHERED:
                y += noise.to(tl.float32) * (2.0**-24) - 0.5
                y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
            return (y + _ROUND).to(tl.int32, bitcast=True)


@triton.jit
def _write(
    x, scale, codes, scales, first_block, places, bytes_, has_byte, num_blocks, start, low, high,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the codes and scales of a tile, and return what they decode to."""
    code = _to_codes(x, scale, start + places, low, high, KIND, LIMIT, DITHERED)
    plane = tl.arange(0, PLANES)[None, :, None]
    packed = tl.sum((code & ((1 << BITS) - 1)) << (plane * BITS), axis=1, keep_dims=True)
    tl.store(codes + first_block * WIDTH + bytes_, packed.to(tl.uint8), has_byte)
    row = tl.arange(0, ROWS)[:, None, None]
    word = scale.to(tl.int32, bitcast=True) >> 16
    tl.store(scales + first_block + row, word.to(tl.int16), row < num_blocks)
    return _from_codes(code, scale, KIND, BITS)


@triton.jit
def _encode_tile(
    values, residual, codes, scales, first_block, h, m, num_blocks, low, high,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    places, bytes_, exists, has_byte = _offsets(h, m, num_blocks, BLOCK, PLANES, WIDTH, ROWS)
    start = first_block * BLOCK
    x = tl.load(values + start + places, exists, other=0.0).to(tl.float32)
    if KEEPS:
        x += _load_residual(residual, start + places, exists, KEEPS)
    scale = _scales(x, m, KIND, LIMIT)
    sent = _write(
        x, scale, codes, scales, first_block, places, bytes_, has_byte, num_blocks, start, low, high,
        KIND, LIMIT, DITHERED, BITS, PLANES, WIDTH, ROWS,
    )  # fmt: skip
    if KEEPS:
        _store_residual(residual, start + places, x - sent, exists & (scale >= 0), KEEPS)


@triton.jit(do_not_specialize=_SIZES)
def _encode(
    values, residual, codes, scales, num_full, tail, low, high,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_block = tl.program_id(0).to(tl.int64) * ROWS
    if first_block < num_full:
        _encode_tile(
            values, residual, codes, scales, first_block, WIDTH, BLOCK, num_full - first_block,
            low, high, KIND, LIMIT, DITHERED, KEEPS, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip
    else:
        _encode_tile(
            values, residual, codes, scales, num_full, (tail + PLANES - 1) // PLANES, tail, 1,
            low, high, KIND, LIMIT, DITHERED, KEEPS, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip


@triton.jit
def _read(
    codes, scales, first_block, bytes_, has_byte, num_blocks,
    KIND: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The values of a tile, from its codes and scales."""
    row = tl.arange(0, ROWS)[:, None, None]
    plane = tl.arange(0, PLANES)[None, :, None]
    word = tl.load(scales + first_block + row, row < num_blocks, other=0).to(tl.int32) << 16
    packed = tl.load(codes + first_block * WIDTH + bytes_, has_byte, other=0).to(tl.int32)
    return _from_codes(packed >> (plane * BITS), word.to(tl.float32, bitcast=True), KIND, BITS)


@triton.jit
def _decode_tile(
    codes, scales, values, first_block, h, m, num_blocks,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    places, bytes_, exists, has_byte = _offsets(h, m, num_blocks, BLOCK, PLANES, WIDTH, ROWS)
    y = _read(codes, scales, first_block, bytes_, has_byte, num_blocks, KIND, BITS, PLANES, WIDTH, ROWS)
    tl.store(values + first_block * BLOCK + places, y.to(values.dtype.element_ty), exists)


@triton.jit(do_not_specialize=_SIZES)
def _decode(
    codes, scales, values, num_full, tail,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_block = tl.program_id(0).to(tl.int64) * ROWS
    if first_block < num_full:
        _decode_tile(
            codes, scales, values, first_block, WIDTH, BLOCK, num_full - first_block,
            KIND, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip
    else:
        _decode_tile(
            codes, scales, values, num_full, (tail + PLANES - 1) // PLANES, tail, 1,
            KIND, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip


@triton.jit
def _reduce_tile(
    rows, halves, num_rows, stride, first_scale, own, own_index, factor, inverse, residual, codes, scales,
    first_block, h, m, num_blocks, low, high,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    places, bytes_, exists, has_byte = _offsets(h, m, num_blocks, BLOCK, PLANES, WIDTH, ROWS)
    start = first_block * BLOCK
    mine = tl.load(own + start + places, exists, other=0.0).to(tl.float32)
    if KEEPS:
        mine += _load_residual(residual, start + places, exists, KEEPS)
    x = tl.full(mine.shape, -0.0, tl.float32)  # which added to a zero leaves its sign
    for r in range(num_rows):
        term = mine
        if r != own_index:
            term = _read(
                rows + r * stride, halves + r * (stride // 2) + first_scale, first_block, bytes_, has_byte,
                num_blocks, KIND, BITS, PLANES, WIDTH, ROWS,
            )  # fmt: skip
        x += term * factor
    x = tl.where(exists, x, 0.0)
    scale = _scales(x, m, KIND, LIMIT)
    sent = _write(
        x, scale, codes, scales, first_block, places, bytes_, has_byte, num_blocks, start, low, high,
        KIND, LIMIT, DITHERED, BITS, PLANES, WIDTH, ROWS,
    )  # fmt: skip
    tl.store(own + start + places, sent.to(own.dtype.element_ty), exists)
    if KEEPS:
        held = (x - sent) * inverse
        _store_residual(residual, start + places, held, exists & (scale >= 0), KEEPS)


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
    first_block = tl.program_id(0).to(tl.int64) * ROWS
    if first_block < num_full:
        _reduce_tile(
            rows, halves, num_rows, stride, first_scale, own, own_index, factor, inverse, residual,
            codes, scales, first_block, WIDTH, BLOCK, num_full - first_block, low, high,
            KIND, LIMIT, DITHERED, KEEPS, BLOCK, BITS, PLANES, WIDTH, ROWS,
        )  # fmt: skip
    else:
        _reduce_tile(
            rows, halves, num_rows, stride, first_scale, own, own_index, factor, inverse, residual,
            codes, scales, num_full, (tail + PLANES - 1) // PLANES, tail, 1, low, high,
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
    return (-(-num_full // rows) + int(tail > 0),), (num_full, tail), shape


def _rounding(form: BlockFormat) -> dict[str, Any]:
    return {"LIMIT": LIMITS.get(form.kind, 1.0), "DITHERED": form.stochastic}


def _keeps(residual: Tensor | None) -> int:
    return 0 if residual is None else 2 if residual.dtype == torch.bfloat16 else 1


def _stored(residual: Tensor) -> Tensor:
    return residual.view(torch.int16) if residual.dtype == torch.bfloat16 else residual


def _words(seed: Seed) -> tuple[int, int]:
    """As signed numbers, whose bits Triton takes for 32-bit words."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in (seed.low, seed.high))  # type: ignore[return-value]
