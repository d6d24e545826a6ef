"""Casts and sums of whole values in numba, for fp32 in host memory; one thread, without the GIL.

Importing this module compiles them (2 s), or reads them from numba's cache on disk (0.2 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.lines import F4, I8, LINE, U2, load, store, stream
from gradwire.ops.cpu.scalars import f32_to_half, half_to_f32, larger
from gradwire.ops.cpu.vectors import fence, part, prefetch, span, streams_to, write

# Partial sums of this many values, 8 KiB, stay in the first-level cache beside what is added to them.
_TILE = 2048
# Memory is read this many values ahead: a processor that reads ahead by itself stops at the end of each page.
_AHEAD = 1024


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
def _encode_sum(total: Any, is_bf16: Any, up: Any, down: Any, own: Any, encoded: Any) -> None:
    for i in range(own.size):
        half = f32_to_half(total[i] * up, is_bf16)
        encoded[i] = half
        own[i] = half_to_f32(half, is_bf16) * down


@kernel((F4[::1], F4, F4[::1], F4))
def _pair_singles(values: Any, scale: Any, own: Any, own_scale: Any) -> None:
    for i in range(own.size):
        own[i] = own[i] * own_scale + values[i] * scale


@helper
def _pair_as(
    is_bf16: Any, values: Any, scale: Any, own: Any, own_scale: Any, up: Any, down: Any, encoded: Any
) -> None:
    num_whole = own.size // LINE * LINE
    for i in range(0, num_whole, LINE):
        prefetch(own, i + _AHEAD)
        prefetch(values, i + _AHEAD)
        total = load(own, i) * own_scale + half_to_f32(load(values, i), is_bf16) * scale
        half = f32_to_half(total * up, is_bf16)
        store(encoded, i, half)
        store(own, i, half_to_f32(half, is_bf16) * down)
    for i in range(num_whole, own.size):
        total = own[i] * own_scale + half_to_f32(values[i], is_bf16) * scale
        half = f32_to_half(total * up, is_bf16)
        encoded[i] = half
        own[i] = half_to_f32(half, is_bf16) * down


@kernel((U2[::1], F4, F4[::1], F4, numba.boolean, F4, F4, U2[::1]))
def _pair_halves(
    values: Any, scale: Any, own: Any, own_scale: Any, is_bf16: Any, up: Any, down: Any, encoded: Any
) -> None:
    if is_bf16:
        _pair_as(True, values, scale, own, own_scale, up, down, encoded)
    else:
        _pair_as(False, values, scale, own, own_scale, up, down, encoded)


@kernel(
    (
        *(U2[::1], F4[::1], numba.boolean, numba.boolean, I8, I8),
        *(F4[::1], I8, F4[::1], F4, F4, U2[::1], F4[::1]),
    )
)
def _reduce(
    halves: Any,
    singles: Any,
    is_single: Any,
    is_bf16: Any,
    stride: Any,
    header: Any,
    own: Any,
    own_index: Any,
    scales: Any,
    up: Any,
    down: Any,
    encoded: Any,
    total: Any,
) -> None:
    for start in range(0, own.size, _TILE):
        size = min(_TILE, own.size - start)
        x, tile = part(total, 0, size), part(own, start, size)
        for r in range(scales.size):
            begin = r * stride + header + start
            if r == own_index:
                _add_singles(tile, scales[r], x, r == 0)
            elif is_single:
                _add_singles(part(singles, begin, size), scales[r], x, r == 0)
            else:
                _add_halves(part(halves, begin, size), is_bf16, scales[r], x, r == 0)
        if is_single:
            write(x, tile, size, False)
        else:
            _encode_sum(x, is_bf16, up, down, tile, part(encoded, start, size))


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


def reduce_rows(
    rows: Tensor,
    header_bytes: int,
    own: Tensor,
    own_index: int,
    scales: Sequence[float | Tensor],
    up: float | Tensor,
    down: float | Tensor,
    encoded: Tensor,
) -> None:
    flat, item = span(rows), encoded.element_size()
    weights = np.array([float(scale) for scale in scales], np.float32)
    factors = np.float32(float(up)), np.float32(float(down))
    if len(weights) == 2:
        # Two terms commute, so no partial sums are kept: a third less time than block by block.
        other = rows[1 - own_index, header_bytes : header_bytes + own.numel() * item]
        terms = _bits(other.view(encoded.dtype)), weights[1 - own_index], own.numpy(), weights[own_index]
        if encoded.dtype == torch.float32:
            _pair_singles(*terms)
        else:
            _pair_halves(*terms, encoded.dtype == torch.bfloat16, *factors, _bits(encoded))
        return
    _reduce(
        flat.view(torch.uint16).numpy(),
        flat.view(torch.float32).numpy(),
        encoded.dtype == torch.float32,
        encoded.dtype == torch.bfloat16,
        rows.stride(0) // item,
        header_bytes // item,
        own.numpy(),
        own_index,
        weights,
        *factors,
        encoded.view(torch.uint16).numpy(),
        np.empty(_TILE, np.float32),
    )


def _bits(values: Tensor) -> Any:
    """As an array that numba knows: 16-bit floats as the integers they are made of."""
    return (values if values.dtype == torch.float32 else values.view(torch.uint16)).numpy()


def encode(values: Tensor, scale: float | Tensor, out: Tensor) -> None:
    _encode(values.numpy(), np.float32(float(scale)), _bits(out), out.dtype == torch.bfloat16)


def decode(values: Tensor, scale: float | Tensor, out: Tensor) -> None:
    factor = np.float32(float(scale))
    _decode(_bits(values), factor, out.numpy(), values.dtype == torch.bfloat16, streams_to(out))


def absmax(values: Tensor) -> Tensor:
    bits = int(_absmax(values.numpy()))
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)
