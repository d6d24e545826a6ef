"""Casts and sums of whole values in numba, for fp32 values in host memory.

Importing this module compiles the kernels (2 s), or loads them from numba's cache on disk (0.2 s).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.lines import F4, I8, LINE, U2, load, store, stream
from gradwire.ops.cpu.scalars import f32_to_half, half_to_f32, larger
from gradwire.ops.cpu.vectors import fence, part, prefetch, span, streams_to, write
from gradwire.ops.operands import NO_RANK, Scale, Terms

# Values in a tile of partial sums: 8 KiB, which stay in the first-level cache beside the terms.
_TILE = 2048
# Values are prefetched this far ahead: the processor's own prefetcher stops at the end of each page.
_AHEAD = 1024


class _CastRows(NamedTuple):
    """The terms of a sum as rows, all in one flat array: once as 16-bit numbers, once as fp32."""

    halves: Any
    singles: Any
    stride: Any
    """Values from one row to the next."""
    header: Any
    """Size of a row's header, in values."""


class _OwnCast(NamedTuple):
    """This rank's term, and its place in the sum."""

    values: Any
    index: Any


class _Encoded(NamedTuple):
    """The encoded sum: its format, its bits, and the factors of encoding and decoding."""

    is_single: Any
    """True for fp32, which is written to this rank's values only."""
    is_bf16: Any
    halves: Any
    up: Any
    down: Any


# The types of their fields.
_ROWS = types.Tuple((U2[::1], F4[::1], I8, I8))
_OWN = types.Tuple((F4[::1], I8))
_ENCODED = types.Tuple((numba.boolean, numba.boolean, U2[::1], F4, F4))


@helper
def _add_singles(values: Any, scale: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = values[i] * scale
    else:
        for i in range(values.size):
            total[i] += values[i] * scale


@helper
def _add_halves(values: Any, is_bf16: Any, scale: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = half_to_f32(values[i], is_bf16) * scale
    else:
        for i in range(values.size):
            total[i] += half_to_f32(values[i], is_bf16) * scale


@helper
def _encode_sum(total: Any, own: Any, encoded: Any, start: Any) -> None:
    halves = part(encoded.halves, start, own.size)
    for i in range(own.size):
        half = f32_to_half(total[i] * encoded.up, encoded.is_bf16)
        halves[i] = half
        own[i] = half_to_f32(half, encoded.is_bf16) * encoded.down


@kernel((F4[::1], F4, F4[::1], F4))
def _add_pair_of_singles(values: Any, scale: Any, own: Any, own_scale: Any) -> None:
    for i in range(own.size):
        own[i] = own[i] * own_scale + values[i] * scale


@helper
def _add_pair_as(is_bf16: Any, values: Any, scale: Any, own: Any, own_scale: Any, encoded: Any) -> None:
    num_whole = own.size // LINE * LINE
    for i in range(0, num_whole, LINE):
        prefetch(own, i + _AHEAD)
        prefetch(values, i + _AHEAD)
        total = load(own, i) * own_scale + half_to_f32(load(values, i), is_bf16) * scale
        half = f32_to_half(total * encoded.up, is_bf16)
        store(encoded.halves, i, half)
        store(own, i, half_to_f32(half, is_bf16) * encoded.down)
    for i in range(num_whole, own.size):
        total = own[i] * own_scale + half_to_f32(values[i], is_bf16) * scale
        half = f32_to_half(total * encoded.up, is_bf16)
        encoded.halves[i] = half
        own[i] = half_to_f32(half, is_bf16) * encoded.down


@kernel((U2[::1], F4, F4[::1], F4, _ENCODED))
def _add_pair_of_halves(values: Any, scale: Any, own: Any, own_scale: Any, encoded: Any) -> None:
    encoded = _Encoded(*encoded)
    if encoded.is_bf16:
        _add_pair_as(True, values, scale, own, own_scale, encoded)
    else:
        _add_pair_as(False, values, scale, own, own_scale, encoded)


@helper
def _add_rows_as(
    is_bf16: Any, first: Any, first_scale: Any, second: Any, second_scale: Any, out: Any, streams: Any
) -> None:
    num_whole = out.size // LINE * LINE
    for i in range(0, num_whole, LINE):
        prefetch(first, i + _AHEAD)
        prefetch(second, i + _AHEAD)
        total = half_to_f32(load(first, i), is_bf16) * first_scale
        total = total + half_to_f32(load(second, i), is_bf16) * second_scale
        if streams:
            stream(out, i, total)
        else:
            store(out, i, total)
    for i in range(num_whole, out.size):
        total = half_to_f32(first[i], is_bf16) * first_scale
        out[i] = total + half_to_f32(second[i], is_bf16) * second_scale


@kernel((U2[::1], F4, U2[::1], F4, F4[::1], numba.boolean, numba.boolean))
def _add_rows_of_halves(
    first: Any, first_scale: Any, second: Any, second_scale: Any, out: Any, is_bf16: Any, streams: Any
) -> None:
    if is_bf16 and streams:
        _add_rows_as(True, first, first_scale, second, second_scale, out, True)
    elif is_bf16:
        _add_rows_as(True, first, first_scale, second, second_scale, out, False)
    elif streams:
        _add_rows_as(False, first, first_scale, second, second_scale, out, True)
    else:
        _add_rows_as(False, first, first_scale, second, second_scale, out, False)
    fence()


@kernel((_ROWS, _OWN, F4[::1], _ENCODED, F4[::1]))
def _reduce(rows: Any, own: Any, scales: Any, encoded: Any, total: Any) -> None:
    rows, own, encoded = _CastRows(*rows), _OwnCast(*own), _Encoded(*encoded)
    for start in range(0, own.values.size, _TILE):
        size = min(_TILE, own.values.size - start)
        x, tile = part(total, 0, size), part(own.values, start, size)
        for r in range(scales.size):
            begin = r * rows.stride + rows.header + start
            if r == own.index:
                _add_singles(tile, scales[r], x, r == 0)
            elif encoded.is_single:
                _add_singles(part(rows.singles, begin, size), scales[r], x, r == 0)
            else:
                _add_halves(part(rows.halves, begin, size), encoded.is_bf16, scales[r], x, r == 0)
        if encoded.is_single or encoded.halves.size == 0:
            write(x, tile, size, False)
        else:
            _encode_sum(x, tile, encoded, start)


@helper
def _encode_as(is_bf16: Any, values: Any, scale: Any, out: Any) -> None:
    num_whole = values.size // LINE * LINE
    for i in range(0, num_whole, LINE):
        prefetch(values, i + _AHEAD)
        store(out, i, f32_to_half(load(values, i) * scale, is_bf16))
    for i in range(num_whole, values.size):
        out[i] = f32_to_half(values[i] * scale, is_bf16)


@kernel((F4[::1], F4, U2[::1], numba.boolean))
def _encode(values: Any, scale: Any, out: Any, is_bf16: Any) -> None:
    if is_bf16:
        _encode_as(True, values, scale, out)
    else:
        _encode_as(False, values, scale, out)


@helper
def _decode_as(is_bf16: Any, values: Any, scale: Any, out: Any, streams: Any) -> None:
    num_whole = out.size // LINE * LINE
    if streams:
        for i in range(0, num_whole, LINE):
            prefetch(values, i + _AHEAD)
            stream(out, i, half_to_f32(load(values, i), is_bf16) * scale)
        fence()
    else:
        for i in range(0, num_whole, LINE):
            prefetch(values, i + _AHEAD)
            store(out, i, half_to_f32(load(values, i), is_bf16) * scale)
    for i in range(num_whole, out.size):
        out[i] = half_to_f32(values[i], is_bf16) * scale


@kernel((U2[::1], F4, F4[::1], numba.boolean, numba.boolean))
def _decode(values: Any, scale: Any, out: Any, is_bf16: Any, streams: Any) -> None:
    if is_bf16:
        _decode_as(True, values, scale, out, streams)
    else:
        _decode_as(False, values, scale, out, streams)


@kernel((F4[::1],))
def _absmax(values: Any) -> Any:
    largest = np.int32(0)
    for i in range(values.size):
        largest = larger(largest, values[i])
    return largest


_ONE = np.float32(1)


def reduce_rows(terms: Terms, encoded: Tensor, up: Scale, down: Scale) -> None:
    own, own_index, item = terms.own.numpy(), terms.own_index, encoded.element_size()
    is_single, is_bf16 = encoded.dtype == torch.float32, encoded.dtype == torch.bfloat16
    scales = np.array([float(scale) for scale in terms.scales], np.float32)
    factors = np.float32(float(up)), np.float32(float(down))
    out = is_single, is_bf16, encoded.view(torch.uint16).numpy(), *factors
    if len(scales) == 2:
        # Two terms commute, so they need no partial sums: a third less time than tile by tile.
        begin, other_index = terms.header_bytes, 1 - own_index
        other = terms.rows[other_index, begin : begin + own.size * item].view(encoded.dtype)
        pair = _bits(other), scales[other_index], own, scales[own_index]
        if is_single:
            _add_pair_of_singles(*pair)
        else:
            _add_pair_of_halves(*pair, out)
        return
    _reduce(_rows(terms, item), (own, own_index), scales, out, np.empty(_TILE, np.float32))


def sum_rows(terms: Terms, dtype: torch.dtype) -> None:
    own, scales = terms.own.numpy(), np.array([float(scale) for scale in terms.scales], np.float32)
    if len(scales) == 2 and terms.own_index == NO_RANK and dtype != torch.float32:
        begin, end = terms.header_bytes, terms.header_bytes + own.size * dtype.itemsize
        first, second = (_bits(row[begin:end].view(dtype)) for row in terms.rows)
        pair = first, scales[0], second, scales[1]
        _add_rows_of_halves(*pair, own, dtype == torch.bfloat16, streams_to(terms.own))
        return
    # Without memory for halves, the sum is not encoded.
    out = dtype == torch.float32, dtype == torch.bfloat16, np.empty(0, np.uint16), _ONE, _ONE
    rows = _rows(terms, dtype.itemsize)
    _reduce(rows, (own, terms.own_index), scales, out, np.empty(_TILE, np.float32))


def _rows(terms: Terms, item: int) -> tuple[Any, ...]:
    """Return rows for the kernels, whose values have ``item`` bytes each."""
    flat = span(terms.rows)
    values = flat.view(torch.uint16).numpy(), flat.view(torch.float32).numpy()
    return *values, terms.rows.stride(0) // item, terms.header_bytes // item


def _bits(values: Tensor) -> Any:
    """Return an array that numba knows: 16-bit floats as unsigned integers."""
    return (values if values.dtype == torch.float32 else values.view(torch.uint16)).numpy()


def encode(values: Tensor, scale: Scale, out: Tensor) -> None:
    _encode(values.numpy(), np.float32(float(scale)), _bits(out), out.dtype == torch.bfloat16)


def decode(values: Tensor, scale: Scale, out: Tensor) -> None:
    factor = np.float32(float(scale))
    _decode(_bits(values), factor, out.numpy(), values.dtype == torch.bfloat16, streams_to(out))


def absmax(values: Tensor) -> Tensor:
    bits = int(_absmax(values.numpy()))
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)
