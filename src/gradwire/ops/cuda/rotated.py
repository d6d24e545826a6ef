"""Rotated blocks in Triton, for values in CUDA memory.

One kernel each encodes, decodes and sums: a block is read, rotated in registers, and written. See `rotation`
for how. Products are not fused with sums, so that results are those of the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.cuda.codes import to_bf16
from gradwire.ops.cuda.rotation import RotatedTile, coded, decoded
from gradwire.ops.formats import RANK_STEP, TIME_STEP, RotatedFormat, Seed
from gradwire.ops.operands import Chunk, RotatedRows, Scale

# Arguments whose values do not cause a new compilation.
_SIZES = [
    "numel",
    "tail_size",
    "low",
    "high",
    "num_rows",
    "first_scale",
    "own_index",
    "term_low",
    "term_high",
]
# Pointers for which Triton must not use vectors: a thread would get four neighbours, and not a column.
_VALUES = ["values", "own"]
_RANK_STEP = tl.constexpr(RANK_STEP)
_TIME_STEP = tl.constexpr(TIME_STEP)
# The most registers of a thread, by operation; more leave room for fewer warps. On an H200, encoding and
# decoding take the same time with any number from 64 on.
_TUNED: dict[str, int | None] = {"encode": None, "decode": None, "reduce": 128}


@triton.jit
def _block(numel, TILE: tl.constexpr):
    """Return this program's block, the place of its first value, and its number of values."""
    block = tl.program_id(0).to(tl.int64)
    start = block * (TILE.rows * 32)
    return block, start, tl.minimum(numel - start, TILE.rows * 32).to(tl.int32)


@triton.jit
def _low_word(low, step, STEP_ON_DEVICE: tl.constexpr):
    """Return the low word of a seed, of the step that is on the device if it is there."""
    if STEP_ON_DEVICE:
        return low.to(tl.uint32) + tl.load(step).to(tl.uint32) * _TIME_STEP
    else:
        return low.to(tl.uint32)


@triton.jit
def _values_of(m, TILE: tl.constexpr):
    """Return offsets from a block's first value (row, column), and a mask of those that exist."""
    offsets = tl.arange(0, TILE.rows)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return offsets, offsets < m


@triton.jit
def _words_of(codes, block, size, TILE: tl.constexpr):
    """Return pointers to a block's words of the first plane (1, row), and a mask of those that exist."""
    row = tl.arange(0, TILE.rows)[None, :]
    return codes + block * (TILE.rows * TILE.bits) + row, row * 32 < size


@triton.jit
def _read(codes, scales, block, seed, size, TILE: tl.constexpr):
    """Return the values that a block of a row decodes to."""
    scale = (tl.load(scales + block).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    first, exists = _words_of(codes, block, size, TILE)
    signs = tl.load(first, exists, other=0)
    second, third = signs, signs
    if TILE.bits > 1:
        second = tl.load(first + size // 32, exists, other=0)
    if TILE.bits > 2:
        third = tl.load(first + size // 32 * 2, exists, other=0)
    return decoded((signs, second, third), scale, block, seed, size, TILE)


@triton.jit
def _write(codes, scales, x, block, seed, size, TILE: tl.constexpr):
    """Encode a block to a row, and return its words of codes and its scale."""
    words, scale = coded(x, block, seed, size, TILE)
    scale = to_bf16(scale.to(tl.int32, bitcast=True))
    tl.store(scales + block, (scale >> 16).to(tl.int16))
    first, exists = _words_of(codes, block, size, TILE)
    tl.store(first, words[0], exists)
    if TILE.bits > 1:
        tl.store(first + size // 32, words[1], exists)
    if TILE.bits > 2:
        tl.store(first + size // 32 * 2, words[2], exists)
    return words, scale.to(tl.float32, bitcast=True)


# Each kernel is compiled twice: for full blocks, whose masks vanish, and for one of ``m`` values, padded to
# ``size``.


@triton.jit
def _encode_block(values, codes, scales, block, seed, m, size, TILE: tl.constexpr):
    offsets, exists = _values_of(m, TILE)
    x = tl.load(values + offsets, exists, other=0.0).to(tl.float32)
    _write(codes, scales, x, block, seed, size, TILE)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VALUES)
def _encode(
    values, codes, scales, numel, tail_size, low, high, step,
    STEP_ON_DEVICE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block, start, m = _block(numel, TILE)
    seed = _low_word(low, step, STEP_ON_DEVICE), high
    full: tl.constexpr = TILE.rows * 32
    if m == full:
        _encode_block(values + start, codes, scales, block, seed, full, full, TILE)
    else:
        _encode_block(values + start, codes, scales, block, seed, m, tail_size, TILE)


@triton.jit
def _decode_block(codes, scales, values, block, seed, m, size, TILE: tl.constexpr):
    x = _read(codes, scales, block, seed, size, TILE)
    offsets, exists = _values_of(m, TILE)
    tl.store(values + offsets, x.to(values.dtype.element_ty), exists)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VALUES)
def _decode(
    codes, scales, values, numel, tail_size, low, high, step,
    STEP_ON_DEVICE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block, start, m = _block(numel, TILE)
    seed = _low_word(low, step, STEP_ON_DEVICE), high
    full: tl.constexpr = TILE.rows * 32
    if m == full:
        _decode_block(codes, scales, values + start, block, seed, full, full, TILE)
    else:
        _decode_block(codes, scales, values + start, block, seed, m, tail_size, TILE)


@triton.jit
def _reduce_block(
    terms, own, own_index, factor, codes, scales, block, seed, m, size, TERM: tl.constexpr, TILE: tl.constexpr
):
    rows, scales_of_row, num_rows, stride, term_low, high_of_row = terms
    offsets, exists = _values_of(m, TILE)
    x = tl.full((TILE.rows, 32), -0.0, tl.float32)  # added to a zero, -0.0 keeps the zero's sign
    for r in range(num_rows):
        if r == own_index:
            x += tl.load(own + offsets, exists, other=0.0).to(tl.float32) * factor
        else:
            x += _read(rows, scales_of_row, block, (term_low, high_of_row), size, TERM) * factor
        # Advanced row by row: the product r * stride may overflow 32 bits.
        rows += stride // 4
        scales_of_row += stride // 2
        high_of_row += _RANK_STEP
    words, scale = _write(codes, scales, tl.where(exists, x, 0.0), block, seed, size, TILE)
    sent = decoded(words, scale, block, seed, size, TILE)
    tl.store(own + offsets, sent.to(own.dtype.element_ty), exists)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VALUES)
def _reduce(
    rows, halves, num_rows, stride, first_scale, term_low, term_high, own, own_index, factors, factor,
    codes, scales, numel, tail_size, low, high, step,
    FACTOR_ON_DEVICE: tl.constexpr, STEP_ON_DEVICE: tl.constexpr, TERM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if FACTOR_ON_DEVICE:
        factor = tl.load(factors)
    block, start, m = _block(numel, TILE)
    seed = _low_word(low, step, STEP_ON_DEVICE), high
    term_low = _low_word(term_low, step, STEP_ON_DEVICE)
    full: tl.constexpr = TILE.rows * 32
    terms = rows, halves + first_scale, num_rows, stride, term_low, term_high.to(tl.uint32)
    if m == full:
        _reduce_block(
            terms, own + start, own_index, factor, codes, scales, block, seed, full, full, TERM, TILE
        )
    else:
        _reduce_block(
            terms, own + start, own_index, factor, codes, scales, block, seed, m, tail_size, TERM, TILE
        )


def encode(form: RotatedFormat, chunk: Chunk) -> None:
    grid, operands = _operands("encode", form, chunk.row, chunk.values.numel(), chunk.seed)
    _encode[grid](values=chunk.values, **operands)


def decode(form: RotatedFormat, row: Tensor, values: Tensor, seed: Seed) -> None:
    grid, operands = _operands("decode", form, row, values.numel(), seed)
    _decode[grid](values=values, **operands)


def reduce(form: RotatedFormat, chunk: Chunk, terms: RotatedRows, own_index: int, scale: Scale) -> None:
    numel, on_device = chunk.values.numel(), isinstance(scale, Tensor)
    term_low, term_high = _words(terms.seed)
    grid, operands = _operands("reduce", form, chunk.row, numel, chunk.seed)
    _reduce[grid](
        rows=terms.rows.view(torch.int32),
        halves=terms.rows.view(torch.int16),
        num_rows=len(terms.rows),
        stride=terms.rows.stride(0),
        first_scale=terms.form.scales_offset(numel) // 2,
        term_low=term_low,
        term_high=term_high,
        own=chunk.values,
        own_index=own_index,
        factors=scale if on_device else chunk.values,
        factor=1.0 if on_device else scale,
        FACTOR_ON_DEVICE=on_device,
        TERM=RotatedTile.of(terms.form),
        **operands,
    )


def _operands(
    operation: str, form: RotatedFormat, row: Tensor, numel: int, seed: Seed
) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid, and what all kernels take for a row of ``numel`` values."""
    codes, scales = form.split(row, numel)
    low, high = _words(seed)
    return (form.num_blocks(numel),), {
        "codes": codes.view(torch.int32),
        "scales": scales.view(torch.int16),
        "numel": numel,
        "tail_size": form.tail(numel),
        "low": low,
        "high": high,
        "step": codes if seed.step is None else seed.step,
        "STEP_ON_DEVICE": seed.step is not None,
        "TILE": RotatedTile.of(form),
        # A warp's registers hold 1024 values well.
        "num_warps": max(form.block // 1024, 1),
        "maxnreg": _TUNED[operation],
        "enable_fp_fusion": False,
    }


def _words(seed: Seed) -> tuple[int, int]:
    """Return the seed as signed 32-bit numbers, which is how Triton passes words."""
    low, high = (word - (1 << 32) if word >> 31 else word for word in (seed.low, seed.high))
    return low, high
