"""Encodings with a scale per block in Triton, for values in CUDA memory.

A program works on a tile of a few blocks, of shape (plane, block, byte): see `BlockFormat`. Triton deals out
threads from the last axis on, so one thread has all the values of its bytes. Products are not fused with
sums, so that results are those of the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.cuda.codes import Tile, from_codes, from_codes_times, scales_of, to_bf16, to_codes
from gradwire.ops.formats import BlockFormat, Seed
from gradwire.ops.operands import Chunk, Scale

# Values per program and number of warps, by operation and kind: the fastest of some twenty pairs on an H200.
# The slowest pair takes up to five times as long.
_TUNED = {
    "encode": {"int8": (1024, 2), "fp8": (2048, 2), "int4": (1024, 1), "sign": (1024, 1)},
    "decode": {"int8": (1024, 4), "fp8": (512, 2), "int4": (1024, 4), "sign": (2048, 8)},
    "reduce": {"int8": (512, 2), "fp8": (256, 1), "int4": (2048, 1), "sign": (2048, 1)},
}

# Arguments whose values do not cause a new compilation. By default Triton specialises for multiples of 16,
# and turns a 1 into a constant.
_SIZES = ["num_full", "tail", "low", "high", "num_rows", "first_scale", "own_index"]

# The dtype of a residual, as a constant of kernels.
_NO_RESIDUAL = tl.constexpr(0)
_BF16_RESIDUAL = tl.constexpr(2)
_RESIDUALS = {torch.float32: 1, torch.bfloat16: 2}


@triton.jit
def _first_block(num_full, tail, TILE: tl.constexpr):
    """Return this program's first block, True if its tile is whole, and that block's bytes and values.

    A whole tile has only full blocks. The full blocks that are too few for a tile, and the tail, have a
    program each.
    """
    program, num_whole = tl.program_id(0), num_full // TILE.num_blocks
    is_whole = program < num_whole
    block = tl.where(is_whole, program * TILE.num_blocks, num_whole * (TILE.num_blocks - 1) + program)
    m = tl.where(block < num_full, TILE.block, tail)
    return block.to(tl.int64), is_whole, (m + TILE.planes - 1) // TILE.planes, m


@triton.jit
def _places(h, m, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Return offsets from a tile's first value, byte and scale, each followed by a mask of those that exist.

    Unless the tile is ``WHOLE``, it has one block, of ``h`` bytes and ``m`` values.
    """
    plane = tl.arange(0, TILE.planes)[:, None, None]
    block = tl.arange(0, TILE.num_blocks)[None, :, None]
    byte = tl.arange(0, TILE.width)[None, None, :]
    if WHOLE:
        has_scale = tl.full((1, TILE.num_blocks, 1), True, tl.int1)
        has_byte = tl.full((1, TILE.num_blocks, TILE.width), True, tl.int1)
        exists = tl.full((TILE.planes, TILE.num_blocks, TILE.width), True, tl.int1)
    else:
        has_scale = block == 0
        has_byte = has_scale & (byte < h)
        exists = has_byte & (plane * h + byte < m)
    offsets = block * TILE.block + plane * h + byte
    return offsets, exists, block * TILE.width + byte, has_byte, block, has_scale


@triton.jit
def _load_residual(residual, offsets, exists, RESIDUAL: tl.constexpr):
    if RESIDUAL == _BF16_RESIDUAL:  # as integers
        word = tl.load(residual + offsets, exists, other=0).to(tl.int32) << 16
        return word.to(tl.float32, bitcast=True)
    else:
        return tl.load(residual + offsets, exists, other=0.0)


@triton.jit
def _store_residual(residual, offsets, values, exists, RESIDUAL: tl.constexpr):
    if RESIDUAL == _BF16_RESIDUAL:
        word = to_bf16(values.to(tl.int32, bitcast=True))
        tl.store(residual + offsets, (word >> 16).to(tl.int16), exists)
    else:
        tl.store(residual + offsets, values, exists)


@triton.jit
def _read(codes, scales, places, TILE: tl.constexpr):
    """Return the codes of a tile, in their lowest bits, and its scales."""
    _, _, bytes_, has_byte, block, has_scale = places
    plane = tl.arange(0, TILE.planes)[:, None, None]
    word = tl.load(scales + block, has_scale, other=0).to(tl.int32) << 16
    packed = tl.load(codes + bytes_, has_byte, other=0).to(tl.int32)
    return packed >> (plane * TILE.bits), word.to(tl.float32, bitcast=True)


@triton.jit
def _write(codes, scales, code, scale, places, TILE: tl.constexpr):
    _, _, bytes_, has_byte, block, has_scale = places
    plane = tl.arange(0, TILE.planes)[:, None, None]
    packed = tl.sum((code & ((1 << TILE.bits) - 1)) << (plane * TILE.bits), axis=0, keep_dims=True)
    tl.store(codes + bytes_, packed.to(tl.uint8), has_byte)
    tl.store(scales + block, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), has_scale)


@triton.jit
def _encode_tile(
    values, residual, row, seed, block, h, m, WHOLE: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr
):
    codes, scales = row
    places = _places(h, m, WHOLE, TILE)
    offsets, exists = places[0], places[1]
    start = block * TILE.block
    x = tl.load(values + start + offsets, exists, other=0.0).to(tl.float32)
    if RESIDUAL != _NO_RESIDUAL:
        x += _load_residual(residual + start, offsets, exists, RESIDUAL)
    scale = scales_of(x, m, TILE)
    code, sent = to_codes(x, scale, start + offsets, seed, TILE)
    _write(codes + block * TILE.width, scales + block, code, scale, places, TILE)
    if RESIDUAL != _NO_RESIDUAL:
        _store_residual(residual + start, offsets, x - sent, exists & (scale >= 0), RESIDUAL)


@triton.jit(do_not_specialize=_SIZES)
def _encode(
    values, residual, codes, scales, num_full, tail, low, high, RESIDUAL: tl.constexpr, TILE: tl.constexpr
):
    row, seed = (codes, scales), (low, high)
    block, is_whole, h, m = _first_block(num_full, tail, TILE)
    if is_whole:
        _encode_tile(values, residual, row, seed, block, TILE.width, TILE.block, True, RESIDUAL, TILE)
    else:
        _encode_tile(values, residual, row, seed, block, h, m, False, RESIDUAL, TILE)


@triton.jit
def _decode_tile(codes, scales, values, block, h, m, WHOLE: tl.constexpr, TILE: tl.constexpr):
    places = _places(h, m, WHOLE, TILE)
    offsets, exists = places[0], places[1]
    code, scale = _read(codes + block * TILE.width, scales + block, places, TILE)
    y = from_codes(code, scale, TILE)
    tl.store(values + block * TILE.block + offsets, y.to(values.dtype.element_ty), exists)


@triton.jit(do_not_specialize=_SIZES)
def _decode(codes, scales, values, num_full, tail, TILE: tl.constexpr):
    block, is_whole, h, m = _first_block(num_full, tail, TILE)
    if is_whole:
        _decode_tile(codes, scales, values, block, TILE.width, TILE.block, True, TILE)
    else:
        _decode_tile(codes, scales, values, block, h, m, False, TILE)


@triton.jit
def _reduce_tile(
    terms, own, residual, row, seed, block, h, m,
    WHOLE: tl.constexpr, IS_SUM: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    rows, halves, num_rows, stride, first_scale, own_index, factor, inverse = terms
    codes, scales = row
    places = _places(h, m, WHOLE, TILE)
    offsets, exists = places[0], places[1]
    start = block * TILE.block
    mine = tl.load(own + start + offsets, exists, other=0.0).to(tl.float32)
    if RESIDUAL != _NO_RESIDUAL:
        mine += _load_residual(residual + start, offsets, exists, RESIDUAL)
    codes_of_row, scales_of_row = rows + block * TILE.width, halves + first_scale + block
    x = tl.full(mine.shape, -0.0, tl.float32)  # added to a zero, -0.0 keeps the zero's sign
    for r in range(num_rows):
        if r == own_index:
            x += mine * factor
        else:
            code, scale = _read(codes_of_row, scales_of_row, places, TILE)
            x += from_codes_times(code, scale, factor, TILE)
        # Advanced row by row: the product r * stride may overflow 32 bits.
        codes_of_row += stride
        scales_of_row += stride // 2
    if IS_SUM:
        tl.store(own + start + offsets, x.to(own.dtype.element_ty), exists)
    else:
        x = tl.where(exists, x, 0.0)
        scale = scales_of(x, m, TILE)
        code, sent = to_codes(x, scale, start + offsets, seed, TILE)
        _write(codes + block * TILE.width, scales + block, code, scale, places, TILE)
        tl.store(own + start + offsets, sent.to(own.dtype.element_ty), exists)
        if RESIDUAL != _NO_RESIDUAL:
            left_out = (x - sent) * inverse
            _store_residual(residual + start, offsets, left_out, exists & (scale >= 0), RESIDUAL)


@triton.jit(do_not_specialize=_SIZES)
def _reduce(
    rows, halves, num_rows, stride, first_scale, own, own_index, factors, factor, inverse, residual,
    codes, scales, num_full, tail, low, high,
    FACTORS_ON_DEVICE: tl.constexpr, IS_SUM: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if FACTORS_ON_DEVICE:
        factor = tl.load(factors)
        inverse = tl.load(factors + 1)
    terms = (rows, halves, num_rows, stride, first_scale, own_index, factor, inverse)
    row, seed = (codes, scales), (low, high)
    block, is_whole, h, m = _first_block(num_full, tail, TILE)
    if is_whole:
        whole = TILE.width, TILE.block
        _reduce_tile(terms, own, residual, row, seed, block, whole[0], whole[1], True, IS_SUM, RESIDUAL, TILE)
    else:
        _reduce_tile(terms, own, residual, row, seed, block, h, m, False, IS_SUM, RESIDUAL, TILE)


def encode(form: BlockFormat, chunk: Chunk) -> None:
    grid, launch = _launch("encode", form, chunk.values.numel())
    _encode[grid](
        values=chunk.values,
        **_residual(chunk),
        **_row(form, chunk.row, chunk.values.numel()),
        **_words(chunk.seed),
        **launch,
    )


def decode(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    grid, launch = _launch("decode", form, values.numel())
    _decode[grid](values=values, **_row(form, row, values.numel()), **launch)


def reduce(
    form: BlockFormat, chunk: Chunk, rows: Tensor, own_index: int, scale: Scale, *, is_sum: bool = False
) -> None:
    numel = chunk.values.numel()
    grid, launch = _launch("reduce", form, numel)
    _reduce[grid](
        rows=rows,
        halves=rows.view(torch.int16),
        num_rows=len(rows),
        stride=rows.stride(0),
        first_scale=form.scales_offset(numel) // 2,
        own=chunk.values,
        own_index=own_index,
        **_factors(scale, chunk.values),
        IS_SUM=is_sum,
        **_residual(chunk),
        **_row(form, chunk.row, numel),
        **_words(chunk.seed),
        **launch,
    )


def sum_rows(form: BlockFormat, own: Tensor, rows: Tensor, own_index: int, scale: Scale) -> None:
    # The row is not written.
    row = rows[own_index, : form.row_bytes(own.numel())]
    reduce(form, Chunk(own, row), rows, own_index, scale, is_sum=True)


def _launch(operation: str, form: BlockFormat, numel: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid, and the arguments that follow from a format and a number of values."""
    num_full, tail = divmod(numel, form.block)
    num_values, num_warps = _TUNED[operation][form.kind]
    tile = Tile.of(form, num_blocks=max(num_values // form.block, 1))
    num_whole, num_single = divmod(num_full, tile.num_blocks)
    grid = (num_whole + num_single + int(tail > 0),)
    sizes = {"num_full": num_full, "tail": tail}
    return grid, {**sizes, "TILE": tile, "num_warps": num_warps, "enable_fp_fusion": False}


def _row(form: BlockFormat, row: Tensor, numel: int) -> dict[str, Tensor]:
    codes, scales = form.split(row, numel)
    return {"codes": codes, "scales": scales.view(torch.int16)}


def _factors(scale: Scale, unused: Tensor) -> dict[str, Any]:
    """Return a scale and its inverse, as a tensor if the scale is one: its value is not known here."""
    if isinstance(scale, Tensor):
        wide = scale.to(torch.float64)
        factors = torch.stack([wide, 1 / wide]).to(torch.float32)
        return {"factors": factors, "factor": 1.0, "inverse": 1.0, "FACTORS_ON_DEVICE": True}
    return {"factors": unused, "factor": scale, "inverse": 1 / scale, "FACTORS_ON_DEVICE": False}


def _residual(chunk: Chunk) -> dict[str, Any]:
    residual = chunk.residual
    if residual is None:
        return {"residual": chunk.values, "RESIDUAL": 0}
    stored = residual.view(torch.int16) if residual.dtype == torch.bfloat16 else residual
    return {"residual": stored, "RESIDUAL": _RESIDUALS[residual.dtype]}


def _words(seed: Seed) -> dict[str, int]:
    """Return the seed as signed 32-bit numbers, which is how Triton passes words."""
    low, high = (word - (1 << 32) if word >> 31 else word for word in (seed.low, seed.high))
    return {"low": low, "high": high}
