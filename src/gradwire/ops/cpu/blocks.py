"""Encodings with a scale per block in numba, for fp32 values in host memory.

The kernels work block by block, so that main memory is read and written once: a sum stays in the first-level
cache until it is packed, and the next block is prefetched meanwhile. Importing this module compiles the
kernels, or loads them from numba's cache on disk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.lines import F4, I4, I8, LINE, U1, U2, load, point, store
from gradwire.ops.cpu.packing import Destination, Noise, Partials, Source, pack
from gradwire.ops.cpu.scalars import bf16_to_f32, f32_to_bf16
from gradwire.ops.cpu.unpacking import add_unpacked, unpack
from gradwire.ops.cpu.vectors import copy, fence, span, streams_to, write
from gradwire.ops.formats import KINDS, LIMITS, BlockFormat, Seed
from gradwire.ops.operands import Chunk, Scale

# Values are prefetched this far ahead of those in use: 4 KiB.
_AHEAD = 1024
# Spare values behind a block in scratch memory: the lines of its last plane may end there.
_SPARE = 2 * LINE


class _Format(NamedTuple):
    """A `BlockFormat` in numbers."""

    kind: Any
    block: Any
    shift: Any
    """A byte holds ``1 << shift`` values."""
    limit: Any
    stochastic: Any


class _BlockRows(NamedTuple):
    """The terms of a sum as rows, all in one flat array: once as bytes, once as 16-bit numbers."""

    codes: Any
    halves: Any
    num_rows: Any
    stride: Any
    """Bytes from one row to the next."""
    first_scale: Any
    """Place of a row's first scale, in 16-bit numbers."""


class _OwnBlocks(NamedTuple):
    """This rank's term: its values, its place in the sum, and the scale of all terms."""

    values: Any
    index: Any
    scale: Any
    inverse: Any
    """``1 / scale``, which brings what is left out back to the size of a residual."""
    is_written: Any
    """True if the values become what the sum decodes to."""


class _Residual(NamedTuple):
    """A residual in fp32 or bf16: one of the two is empty, both if there is none."""

    singles: Any
    halves: Any


class _Row(NamedTuple):
    """Codes, and scales as the bits of bf16."""

    codes: Any
    scales: Any


class _Words(NamedTuple):
    """A `Seed` as two signed words."""

    low: Any
    high: Any


class _Scratch(NamedTuple):
    """Memory for four blocks and the partial sums of one, and for the codes of a block."""

    values: Any
    codes: Any


# The types of their fields.
_FORMAT = types.Tuple((I8, I8, I8, F4, numba.boolean))
_ROWS = types.Tuple((U1[::1], U2[::1], I8, I8, I8))
_OWN = types.Tuple((F4[::1], I8, F4, F4, numba.boolean))
_RESIDUAL = types.Tuple((F4[::1], U2[::1]))
_ROW = types.Tuple((U1[::1], U2[::1]))
_WORDS = types.Tuple((I4, I4))
_SCRATCH = types.Tuple((F4[::1], U1[::1]))


@helper
def _widen(halves: Any, singles: Any, m: Any) -> None:
    for i in range(m):
        singles[i] = bf16_to_f32(halves[i])


@helper
def _narrow(singles: Any, halves: Any, m: Any) -> None:
    for i in range(m):
        halves[i] = f32_to_bf16(singles[i])


@helper
def _readable(codes: Any, num_bytes: Any, spare: Any, fits: Any) -> Any:
    """Return the codes, copied to spare memory if whole lines would end behind them."""
    if not fits:
        copy(codes, spare, num_bytes)
    return codes if fits else point(spare, 0)


@helper
def _add(term: Any, residual: Any, has_residual: Any, scale: Any, total: Any, m: Any, is_first: Any) -> None:
    for i in range(0, m, LINE):
        values = load(term, i)
        if has_residual:
            values = values + load(residual, i)
        values = values * scale
        if not is_first:
            values = load(total, i) + values
        store(total, i, values)


class _Codes(NamedTuple):
    """The codes of a block in a row. Pointers, since numba counts the references of arrays in each call."""

    bytes: Any
    num_bytes: Any
    num_values: Any
    fits: Any
    """True if no line ends behind the block."""
    spare: Any
    """Memory for the codes, and for the values that they decode to, if lines do."""
    spare_values: Any


@helper
def _add_row(
    kind: Any, codes: Any, scale: Any, factor: Any, total: Any, target: Any, is_first: Any, streams: Any
) -> None:
    """Decode a block, and write it times the factor, plus ``total`` unless it is the first, to ``target``."""
    # Constants in each call, so that the loops have no branches.
    if codes.fits and is_first:
        add_unpacked(kind, codes.bytes, codes.num_bytes, scale, factor, total, target, True, False)
    elif codes.fits and streams:
        add_unpacked(kind, codes.bytes, codes.num_bytes, scale, factor, total, target, False, True)
    elif codes.fits:
        add_unpacked(kind, codes.bytes, codes.num_bytes, scale, factor, total, target, False, False)
    else:
        y = codes.spare_values
        copy(codes.bytes, codes.spare, codes.num_bytes)
        unpack(kind, codes.spare, codes.num_bytes, scale, y)
        _add(y, y, False, factor, target, codes.num_values, is_first)


@kernel((_FORMAT, _ROWS, _OWN, _RESIDUAL, _ROW, _WORDS, _SCRATCH))
def _reduce(form: Any, rows: Any, own: Any, residual: Any, row: Any, seed: Any, scratch: Any) -> None:
    form, rows, own, residual = _Format(*form), _BlockRows(*rows), _OwnBlocks(*own), _Residual(*residual)
    row, seed, scratch = _Row(*row), _Words(*seed), _Scratch(*scratch)
    block, shift = form.block, form.shift
    padded, num_partials = block + _SPARE, max(block // 8, LINE)
    x, y, spare_codes = point(scratch.values, 0), point(scratch.values, padded), point(scratch.codes, 0)
    spare, spare_residual = point(scratch.values, 2 * padded), point(scratch.values, 3 * padded)
    partials = point(scratch.values, 4 * padded)
    is_single, is_half = residual.singles.size > 0, residual.halves.size > 0
    has_residual = is_single or is_half
    ahead = max(block, _AHEAD)
    for b in range(row.scales.size):
        start, at = b * block, b * (block >> shift)
        m = min(block, own.values.size - start)
        num_bytes = (m + (1 << shift) - 1) >> shift
        # A block whose lines would end behind it is worked on in scratch memory.
        fits = m == block and num_bytes % LINE == 0
        own_, packed = point(own.values, start), point(row.codes, at)
        singles, halves = point(residual.singles, start), point(residual.halves, start)
        values, codes = own_ if fits else spare, packed if fits else point(scratch.codes, 0)
        decoded = own_ if fits and own.is_written else spare
        left_out = singles if fits and is_single else spare_residual
        if not fits:
            copy(own_, spare, m)
            copy(singles, spare_residual, m if is_single else 0)
        if is_half:
            _widen(halves, left_out, m)
        # A single term that is only read needs no sum.
        if rows.num_rows > 1 or has_residual or not fits:
            for r in range(rows.num_rows):
                if r == own.index:
                    _add(values, left_out, has_residual, own.scale, x, m, r == 0)
                else:
                    scale = bf16_to_f32(rows.halves[r * (rows.stride // 2) + rows.first_scale + b])
                    theirs = point(rows.codes, r * rows.stride + at)
                    term = _Codes(theirs, num_bytes, m, fits, spare_codes, y)
                    _add_row(form.kind, term, scale, own.scale, x, x, r == 0, False)
            values = x
        if not fits:
            for i in range(m, m + _SPARE):
                x[i] = 0
        scale = pack(
            form,
            Source(values, m, point(own_, ahead), point(singles if is_single else own_, ahead)),
            Destination(codes, not (has_residual or own.is_written), decoded, left_out, own.inverse),
            Noise(start, seed.low, seed.high),
            Partials(partials, num_partials),
        )
        row.scales[b] = f32_to_bf16(scale)
        if not fits:
            copy(scratch.codes, packed, num_bytes)
            copy(spare_residual, singles, m if is_single else 0)
            copy(spare, own_, m if own.is_written else 0)
        if is_half:
            _narrow(left_out, halves, m)


@kernel((_FORMAT, _ROWS, F4[::1], I8, F4, numba.boolean, _SCRATCH))
def _sum(form: Any, rows: Any, own: Any, own_index: Any, factor: Any, streams: Any, scratch: Any) -> None:
    form, rows, scratch = _Format(*form), _BlockRows(*rows), _Scratch(*scratch)
    block, shift = form.block, form.shift
    padded, last = block + _SPARE, rows.num_rows - 1
    x, y, spare_codes = point(scratch.values, 0), point(scratch.values, padded), point(scratch.codes, 0)
    spare = point(scratch.values, 2 * padded)
    for b in range((own.size + block - 1) // block):
        start, at = b * block, b * (block >> shift)
        m = min(block, own.size - start)
        num_bytes = (m + (1 << shift) - 1) >> shift
        fits = m == block and num_bytes % LINE == 0
        values = point(own, start)
        # The last term is written with the sum, unless lines would end behind the block.
        ends_there = fits and own_index != last
        for r in range(rows.num_rows):
            if r == own_index:
                copy(values, spare, m)
                _add(spare, spare, False, factor, x, m, r == 0)
            else:
                ends = ends_there and r == last
                scale = bf16_to_f32(rows.halves[r * (rows.stride // 2) + rows.first_scale + b])
                theirs = point(rows.codes, r * rows.stride + at)
                term = _Codes(theirs, num_bytes, m, fits, spare_codes, y)
                _add_row(form.kind, term, scale, factor, x, values if ends else x, r == 0, ends and streams)
        if not ends_there:
            write(x, values, m, streams)
    fence()


@kernel((_FORMAT, _ROW, F4[::1], numba.boolean, _SCRATCH))
def _decode(form: Any, row: Any, values: Any, streams: Any, scratch: Any) -> None:
    form, row, scratch = _Format(*form), _Row(*row), _Scratch(*scratch)
    block, shift = form.block, form.shift
    y = point(scratch.values, 0)
    for b in range(row.scales.size):
        start, at = b * block, b * (block >> shift)
        m = min(block, values.size - start)
        num_bytes = (m + (1 << shift) - 1) >> shift
        fits = m == block and num_bytes % LINE == 0
        codes = _readable(point(row.codes, at), num_bytes, scratch.codes, fits)
        target = point(values, start)
        in_place = fits and not streams
        unpack(form.kind, codes, num_bytes, bf16_to_f32(row.scales[b]), target if in_place else y)
        if not in_place:
            write(y, target, m, streams)
    fence()


_NO_SINGLES, _NO_HALVES = np.empty(0, np.float32), np.empty(0, np.uint16)
_NO_RESIDUAL = _Residual(_NO_SINGLES, _NO_HALVES)
_NO_ROWS = _BlockRows(np.empty(0, np.uint8), _NO_HALVES, num_rows=1, stride=0, first_scale=0)
_ONE = np.float32(1)


def encode(form: BlockFormat, chunk: Chunk) -> None:
    # A sum of one term, which is not written back.
    _run(form, chunk, _NO_ROWS, _OwnBlocks(chunk.values.numpy(), 0, _ONE, _ONE, is_written=False))


def decode(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    encoded, scratch = tuple(_row(form, row, values.numel())), tuple(_scratch(form))
    _decode(tuple(_format(form)), encoded, values.numpy(), streams_to(values), scratch)


def reduce(form: BlockFormat, chunk: Chunk, rows: Tensor, own_index: int, scale: Scale) -> None:
    scales = np.float32(float(scale)), np.float32(1 / float(scale))
    own = _OwnBlocks(chunk.values.numpy(), own_index, *scales, is_written=True)
    _run(form, chunk, _terms(form, rows, chunk.values.numel()), own)


def sum_rows(form: BlockFormat, own: Tensor, rows: Tensor, own_index: int, scale: Scale) -> None:
    terms, scratch = _terms(form, rows, own.numel()), tuple(_scratch(form))
    values, factor = own.numpy(), np.float32(float(scale))
    _sum(tuple(_format(form)), tuple(terms), values, own_index, factor, streams_to(own), scratch)


def _terms(form: BlockFormat, rows: Tensor, numel: int) -> _BlockRows:
    flat, first_scale = span(rows), form.scales_offset(numel) // 2
    return _BlockRows(flat.numpy(), _halves(flat), len(rows), rows.stride(0), first_scale)


def _run(form: BlockFormat, chunk: Chunk, rows: _BlockRows, own: _OwnBlocks) -> None:
    residual, row = _residual(chunk.residual), _row(form, chunk.row, chunk.values.numel())
    operands = _format(form), rows, own, residual, row, _words(chunk.seed), _scratch(form)
    _reduce(*map(tuple, operands))


@functools.cache
def _format(form: BlockFormat) -> _Format:
    limit = np.float32(LIMITS.get(form.kind, 0.0))
    shift = form.values_per_byte.bit_length() - 1
    return _Format(KINDS[form.kind], form.block, shift, limit, form.stochastic)


def _residual(residual: Tensor | None) -> _Residual:
    if residual is None:
        return _NO_RESIDUAL
    if residual.dtype == torch.bfloat16:
        return _Residual(_NO_SINGLES, _halves(residual))
    return _Residual(residual.numpy(), _NO_HALVES)


def _row(form: BlockFormat, row: Tensor, numel: int) -> _Row:
    codes, scales = form.split(row, numel)
    return _Row(codes.numpy(), _halves(scales))


def _scratch(form: BlockFormat) -> _Scratch:
    # By torch, whose memory begins at a cache line: elsewhere, a line of values would take two accesses.
    padded = form.block + _SPARE
    values = torch.empty(4 * padded + max(form.block // 8, LINE), dtype=torch.float32)
    return _Scratch(values.numpy(), torch.empty(padded, dtype=torch.uint8).numpy())


def _halves(values: Tensor) -> Any:
    return values.view(torch.uint16).numpy()


def _words(seed: Seed) -> _Words:
    return _Words(np.uint32(seed.low).astype(np.int32), np.uint32(seed.high).astype(np.int32))
