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
# Instructions per value of a full block of 1024, as Triton 3.6 compiles them for compute capability 9.0; in
# brackets, those of the units for integers and comparisons, which take two cycles each:
#                         int2       int3           sign
#   encode           29.2  (9)  36.9 (12)       25.2  (7)
#   decode           21.1  (7)  23.4  (9)       20.0  (6)
#   reduce, 2 rows   73.7 (22)  85.1 (30)       66.9 (19)
# With masks, and bits that were chosen and joined one by one, int2 took 32.3 (13), 23.1 (9) and 87.8 (32). An
# H200 issues about 33 in the time that it takes to read one value at the bandwidth of a copy.

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
def _values_of(values, m, TILE: tl.constexpr):
    """Return pointers to a block's values (row, column), and a mask of those that exist."""
    row, column = tl.arange(0, TILE.rows)[:, None] * 32, tl.arange(0, 32)[None, :]
    # In this order, a thread's pointers differ by constants, which are a part of instructions.
    return (values + column) + row, row + column < m


@triton.jit
def _load(pointers, exists, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, exists, other=0)


@triton.jit
def _store(pointers, x, exists, FULL: tl.constexpr):
    if FULL:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, exists)


@triton.jit
def _words_of(codes, block, size, TILE: tl.constexpr):
    """Return pointers to a block's words of the first plane (1, row), and a mask of those that exist."""
    row = tl.arange(0, TILE.rows)[None, :]
    return codes + block * (TILE.rows * TILE.bits) + row, row * 32 < size


@triton.jit
def _read(codes, scales, block, seed, size, TILE: tl.constexpr, FULL: tl.constexpr):
    """Return the values that a block of a row decodes to."""
    scale = (tl.load(scales + block).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    first, exists = _words_of(codes, block, size, TILE)
    signs = _load(first, exists, FULL)
    second, third, fourth = signs, signs, signs
    if TILE.bits > 1:
        second = _load(first + size // 32, exists, FULL)
    if TILE.bits > 2:
        third = _load(first + size // 32 * 2, exists, FULL)
    if TILE.bits > 3:
        fourth = _load(first + size // 32 * 3, exists, FULL)
    return decoded((signs, second, third, fourth), scale, block, seed, size, TILE)


@triton.jit
def _write(codes, scales, x, block, seed, size, TILE: tl.constexpr, FULL: tl.constexpr):
    """Encode a block to a row, and return its words of codes and its scale."""
    words, scale = coded(x, block, seed, size, TILE)
    scale = to_bf16(scale.to(tl.int32, bitcast=True))
    tl.store(scales + block, (scale >> 16).to(tl.int16))
    first, exists = _words_of(codes, block, size, TILE)
    _store(first, words[0], exists, FULL)
    if TILE.bits > 1:
        _store(first + size // 32, words[1], exists, FULL)
    if TILE.bits > 2:
        _store(first + size // 32 * 2, words[2], exists, FULL)
    if TILE.bits > 3:
        _store(first + size // 32 * 3, words[3], exists, FULL)
    return words, scale.to(tl.float32, bitcast=True)


# Each kernel is compiled twice: for full blocks, and for one of ``m`` values, padded to ``size``. Full blocks
# have no masks at all: those that are always true would let the compiler merge both, and compute them.


@triton.jit
def _encode_block(values, codes, scales, block, seed, m, size, TILE: tl.constexpr, FULL: tl.constexpr):
    pointers, exists = _values_of(values, m, TILE)
    x = _load(pointers, exists, FULL).to(tl.float32)
    _write(codes, scales, x, block, seed, size, TILE, FULL)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VALUES)
def _encode(
    values, codes, scales, numel, tail_size, low, high, step,
    STEP_ON_DEVICE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block, start, m = _block(numel, TILE)
    seed = _low_word(low, step, STEP_ON_DEVICE), high
    full: tl.constexpr = TILE.rows * 32
    if m == full:
        _encode_block(values + start, codes, scales, block, seed, full, full, TILE, True)
    else:
        _encode_block(values + start, codes, scales, block, seed, m, tail_size, TILE, False)


@triton.jit
def _decode_block(codes, scales, values, block, seed, m, size, TILE: tl.constexpr, FULL: tl.constexpr):
    x = _read(codes, scales, block, seed, size, TILE, FULL)
    pointers, exists = _values_of(values, m, TILE)
    _store(pointers, x.to(values.dtype.element_ty), exists, FULL)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VALUES)
def _decode(
    codes, scales, values, numel, tail_size, low, high, step,
    STEP_ON_DEVICE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block, start, m = _block(numel, TILE)
    seed = _low_word(low, step, STEP_ON_DEVICE), high
    full: tl.constexpr = TILE.rows * 32
    if m == full:
        _decode_block(codes, scales, values + start, block, seed, full, full, TILE, True)
    else:
        _decode_block(codes, scales, values + start, block, seed, m, tail_size, TILE, False)


@triton.jit
def _reduce_block(
    terms, own, own_index, factor, codes, scales, block, seed, m, size,
    IS_SUM: tl.constexpr, TERM: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    rows, scales_of_row, num_rows, stride, term_low, high_of_row = terms
    pointers, exists = _values_of(own, m, TILE)
    x = tl.full((TILE.rows, 32), -0.0, tl.float32)  # added to a zero, -0.0 keeps the zero's sign
    for r in range(num_rows):
        if r == own_index:
            x += _load(pointers, exists, FULL).to(tl.float32) * factor
        else:
            x += _read(rows, scales_of_row, block, (term_low, high_of_row), size, TERM, FULL) * factor
        # Advanced row by row: the product r * stride may overflow 32 bits.
        rows += stride // 4
        scales_of_row += stride // 2
        high_of_row += _RANK_STEP
    if not IS_SUM:
        if not FULL:
            x = tl.where(exists, x, 0.0)
        words, scale = _write(codes, scales, x, block, seed, size, TILE, FULL)
        x = decoded(words, scale, block, seed, size, TILE)
    _store(pointers, x.to(own.dtype.element_ty), exists, FULL)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VALUES)
def _reduce(
    rows, halves, num_rows, stride, first_scale, term_low, term_high, own, own_index, factors, factor,
    codes, scales, numel, tail_size, low, high, step,
    FACTOR_ON_DEVICE: tl.constexpr, STEP_ON_DEVICE: tl.constexpr,
    IS_SUM: tl.constexpr, TERM: tl.constexpr, TILE: tl.constexpr,
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
            terms, own + start, own_index, factor, codes, scales, block, seed, full, full,
            IS_SUM, TERM, TILE, True,
        )  # fmt: skip
    else:
        _reduce_block(
            terms, own + start, own_index, factor, codes, scales, block, seed, m, tail_size,
            IS_SUM, TERM, TILE, False,
        )  # fmt: skip


def encode(form: RotatedFormat, chunk: Chunk) -> None:
    grid, operands = _operands("encode", form, chunk.row, chunk.values.numel(), chunk.seed)
    _encode[grid](values=chunk.values, **operands)


def decode(form: RotatedFormat, row: Tensor, values: Tensor, seed: Seed) -> None:
    grid, operands = _operands("decode", form, row, values.numel(), seed)
    _decode[grid](values=values, **operands)


def reduce(
    form: RotatedFormat,
    chunk: Chunk,
    terms: RotatedRows,
    own_index: int,
    scale: Scale,
    *,
    is_sum: bool = False,
) -> None:
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
        IS_SUM=is_sum,
        TERM=RotatedTile.of(terms.form),
        **operands,
    )


def sum_rows(own: Tensor, terms: RotatedRows, own_index: int, scale: Scale) -> None:
    # The row is not written. Its seed tells the kernel where the step is.
    row = terms.rows[own_index, : terms.form.row_bytes(own.numel())]
    reduce(terms.form, Chunk(own, row, None, terms.seed), terms, own_index, scale, is_sum=True)


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
