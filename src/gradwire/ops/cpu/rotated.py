"""Rotated blocks in numba, for fp32 values in host memory.

The kernels work block by block, as those of `blocks`: a block is rotated and packed in the first-level cache.
Importing this module compiles the kernels, or loads them from numba's cache on disk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.levels import Target, finish, finish_and_unpack, unpack
from gradwire.ops.cpu.lines import F4, I4, I8, LINE, U1, U2, load, point, store
from gradwire.ops.cpu.rotated_blocks import encode_block
from gradwire.ops.cpu.rotation import Signs
from gradwire.ops.cpu.scalars import bf16_to_f32, f32_to_bf16
from gradwire.ops.cpu.vectors import copy, fence, span, streams_to, write
from gradwire.ops.formats import RANK_STEP, RotatedFormat, Seed
from gradwire.ops.operands import Chunk, RotatedRows, Scale

# Values are prefetched this far ahead of those in use: 4 KiB.
_AHEAD = 1024
_ZERO, _ONE = np.float32(0), np.float32(1)
_RANK_STEP = np.int64(RANK_STEP - (1 << 32))


class _Format(NamedTuple):
    """A `RotatedFormat` in numbers, for rows of one size."""

    bits: Any
    block: Any
    tail: Any
    """Size of the last block, padded, if it is shorter than others; 0 if it is not."""
    unbiased: Any


class _Terms(NamedTuple):
    """The terms of a sum as rows, all in one flat array: once as bytes, once as 16-bit numbers."""

    codes: Any
    halves: Any
    num_rows: Any
    stride: Any
    """Bytes from one row to the next."""
    first_scale: Any
    """Place of a row's first scale, in 16-bit numbers."""
    bits: Any
    low: Any
    high: Any
    """The words of the seed that those of all ranks follow from."""


class _Own(NamedTuple):
    """This rank's term: its values, its place in the sum, and the scale of all terms."""

    values: Any
    index: Any
    scale: Any
    is_written: Any
    """True if the values become what the sum decodes to."""


class _Row(NamedTuple):
    """Codes, scales as the bits of bf16, and the words of the seed."""

    codes: Any
    scales: Any
    low: Any
    high: Any


# The types of their fields.
_FORMAT = types.Tuple((I8, I8, I8, numba.boolean))
_TERMS = types.Tuple((U1[::1], U2[::1], I8, I8, I8, I8, I4, I4))
_OWN = types.Tuple((F4[::1], I8, F4, numba.boolean))
_ROW = types.Tuple((U1[::1], U2[::1], I4, I4))


@helper
def _add(term: Any, scale: Any, total: Any, size: Any, is_first: Any) -> None:
    for i in range(0, size, LINE):
        values = load(term, i) * scale
        if not is_first:
            values = load(total, i) + values
        store(total, i, values)


@helper
def _pad(x: Any, m: Any, size: Any) -> None:
    for i in range(m, size):
        x[i] = _ZERO


@helper
def _num_words(block: Any) -> Any:
    """Return the number of random words for a block."""
    return (block // 1024 + 1) * 32


@kernel((_FORMAT, _TERMS, _OWN, _ROW, F4[::1]))
def _reduce(form: Any, terms: Any, own: Any, row: Any, scratch: Any) -> None:
    form, terms, own, row = _Format(*form), _Terms(*terms), _Own(*own), _Row(*row)
    block = form.block
    x, total, padded = point(scratch, 0), point(scratch, block), point(scratch, 2 * block)
    words = point(scratch, 3 * block)
    squares = point(words, _num_words(block))
    for b in range(row.scales.size):
        start = b * block
        m = min(block, own.values.size - start)
        size = block if m == block else form.tail
        values = point(own.values, start)
        source = values
        if m < size:
            copy(values, padded, m)
            _pad(padded, m, size)
            source = padded
        if terms.num_rows > 1:
            for r in range(terms.num_rows):
                if r == own.index:
                    _add(source, own.scale, total, size, r == 0)
                else:
                    scale = bf16_to_f32(terms.halves[r * (terms.stride // 2) + terms.first_scale + b])
                    codes = point(terms.codes, r * terms.stride + start * terms.bits // 8)
                    signs = Signs(start, terms.low, np.int32(terms.high + r * _RANK_STEP), words)
                    target = Target(total, False, True, r == 0, own.scale, total)
                    unpack(terms.bits, codes, size, x)
                    finish(size, scale, signs, x, target)
            _pad(total, m, size)
            source = total
        signs, codes = Signs(start, row.low, row.high, words), point(row.codes, start * form.bits // 8)
        ahead = point(values, max(block, _AHEAD))
        scale = encode_block(form, source, ahead, size, signs, x, squares, codes)
        row.scales[b] = f32_to_bf16(scale)
        if own.is_written:
            target = Target(padded if m < size else values, False, False, False, _ONE, total)
            unpack(form.bits, codes, size, x)
            finish(size, bf16_to_f32(row.scales[b]), signs, x, target)
            if m < size:
                copy(padded, values, m)


@kernel((I8, I8, _TERMS, F4[::1], I8, F4, numba.boolean, F4[::1]))
def _sum(
    block: Any, tail: Any, terms: Any, own: Any, own_index: Any, factor: Any, streams: Any, scratch: Any
) -> None:
    terms = _Terms(*terms)
    x, total, padded = point(scratch, 0), point(scratch, block), point(scratch, 2 * block)
    words, last = point(scratch, 3 * block), terms.num_rows - 1
    for b in range((own.size + block - 1) // block):
        start = b * block
        m = min(block, own.size - start)
        size = block if m == block else tail
        values = point(own, start)
        # The last term is written with the sum, unless lines would end behind the block.
        ends_there = m == size and own_index != last
        for r in range(terms.num_rows):
            if r == own_index:
                copy(values, padded, m)
                _add(padded, factor, total, size, r == 0)
            else:
                ends = ends_there and r == last
                scale = bf16_to_f32(terms.halves[r * (terms.stride // 2) + terms.first_scale + b])
                codes = point(terms.codes, r * terms.stride + start * terms.bits // 8)
                signs = Signs(start, terms.low, np.int32(terms.high + r * _RANK_STEP), words)
                target = Target(values if ends else total, ends and streams, True, r == 0, factor, total)
                unpack(terms.bits, codes, size, x)
                finish(size, scale, signs, x, target)
        if not ends_there:
            write(total, values, m, streams)
    fence()


@helper
def _decode_1024(form: Any, row: Any, values: Any, streams: Any, scratch: Any) -> Any:
    """Decode all whole blocks of 1024 values, each while the next one is unpacked; return their number."""
    words, num_blocks = point(scratch, 3 * 1024), values.size // 1024
    for b in range(num_blocks):
        x, next_x = point(scratch, b % 2 * 1024), point(scratch, (b + 1) % 2 * 1024)
        if b == 0:
            unpack(form.bits, point(row.codes, 0), 1024, x)
        signs = Signs(b * 1024, row.low, row.high, words)
        target = Target(point(values, b * 1024), streams, False, False, _ONE, words)
        next_codes = point(row.codes, min(b + 1, num_blocks - 1) * 128 * form.bits)
        finish_and_unpack(form.bits, bf16_to_f32(row.scales[b]), signs, x, target, next_codes, next_x)
    return num_blocks


@kernel((_FORMAT, _ROW, F4[::1], numba.boolean, F4[::1]))
def _decode(form: Any, row: Any, values: Any, streams: Any, scratch: Any) -> None:
    form, row = _Format(*form), _Row(*row)
    block = form.block
    x, padded, words = point(scratch, 0), point(scratch, 2 * block), point(scratch, 3 * block)
    first = _decode_1024(form, row, values, streams, scratch) if block == 1024 else 0
    for b in range(first, row.scales.size):
        start = b * block
        m = min(block, values.size - start)
        size = block if m == block else form.tail
        codes, signs = point(row.codes, start * form.bits // 8), Signs(start, row.low, row.high, words)
        to = point(values, start)
        target = Target(padded if m < size else to, streams and m == size, False, False, _ONE, padded)
        unpack(form.bits, codes, size, x)
        finish(size, bf16_to_f32(row.scales[b]), signs, x, target)
        if m < size:
            copy(padded, to, m)
    fence()


_NO_TERMS = _Terms(np.empty(0, np.uint8), np.empty(0, np.uint16), 1, 0, 0, 1, 0, 0)


def encode(form: RotatedFormat, chunk: Chunk) -> None:
    # A sum of one term, which is not written back.
    _run(form, chunk, _NO_TERMS, _Own(chunk.values.numpy(), 0, _ONE, is_written=False))


def decode(form: RotatedFormat, row: Tensor, values: Tensor, seed: Seed) -> None:
    numel = values.numel()
    operands = tuple(_format(form, numel)), tuple(_row(form, row, numel, seed))
    _decode(*operands, values.numpy(), streams_to(values), _scratch(form))


def reduce(form: RotatedFormat, chunk: Chunk, terms: RotatedRows, own_index: int, scale: Scale) -> None:
    own = _Own(chunk.values.numpy(), own_index, np.float32(float(scale)), is_written=True)
    _run(form, chunk, _terms(terms, chunk.values.numel()), own)


def sum_rows(own: Tensor, terms: RotatedRows, own_index: int, scale: Scale) -> None:
    numel, form = own.numel(), terms.form
    values, factor = own.numpy(), np.float32(float(scale))
    blocks = form.block, form.tail(numel), tuple(_terms(terms, numel))
    _sum(*blocks, values, own_index, factor, streams_to(own), _scratch(form))


def _terms(terms: RotatedRows, numel: int) -> _Terms:
    flat, (low, high) = span(terms.rows), _words(terms.seed)
    return _Terms(
        codes=flat.numpy(),
        halves=flat.view(torch.uint16).numpy(),
        num_rows=len(terms.rows),
        stride=terms.rows.stride(0),
        first_scale=terms.form.scales_offset(numel) // 2,
        bits=terms.form.bits,
        low=low,
        high=high,
    )


def _run(form: RotatedFormat, chunk: Chunk, terms: _Terms, own: _Own) -> None:
    numel = chunk.values.numel()
    operands = _format(form, numel), terms, own, _row(form, chunk.row, numel, chunk.seed)
    _reduce(*map(tuple, operands), _scratch(form))


def _format(form: RotatedFormat, numel: int) -> _Format:
    return _Format(form.bits, form.block, form.tail(numel), form.unbiased)


def _row(form: RotatedFormat, row: Tensor, numel: int, seed: Seed) -> _Row:
    codes, scales = form.split(row, numel)
    return _Row(codes.numpy(), scales.view(torch.uint16).numpy(), *_words(seed))


def _words(seed: Seed) -> Any:
    """Return the words of a seed as signed integers."""
    return np.array([seed.low, seed.high], np.uint32).view(np.int32)


def _scratch(form: RotatedFormat) -> Any:
    # Three blocks, the random words and the squares of one. By torch, whose memory begins at a cache line.
    numel = 3 * form.block + (form.block // 1024 + 1) * 32 + max(form.block // 8, 32)
    return torch.empty(numel, dtype=torch.float32).numpy()
