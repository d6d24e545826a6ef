"""Casts and sums of whole values in numba, for fp32 in host memory; one thread, without the GIL.

Importing this module compiles them (3 s), or reads them from numba's cache on disk (0.2 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gradwire.ops.cpu.scalars import (
    F4,
    I8,
    U2,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    kernel,
    larger,
)

# Partial sums of this many values, 8 KiB, stay in the first-level cache beside what is added to them.
_BLOCK = 2048

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@kernel((F4[::1], F4, F4[::1], numba.boolean))
def _add_f32(values: Any, scale: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = values[i] * scale
    else:
        for i in range(values.size):
            total[i] += values[i] * scale


@kernel((U2[::1], F4, F4[::1], numba.boolean))
def _add_f16(values: Any, scale: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = f16_to_f32(values[i]) * scale
    else:
        for i in range(values.size):
            total[i] += f16_to_f32(values[i]) * scale


@kernel((U2[::1], F4, F4[::1], numba.boolean))
def _add_bf16(values: Any, scale: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = bf16_to_f32(values[i]) * scale
    else:
        for i in range(values.size):
            total[i] += bf16_to_f32(values[i]) * scale


@kernel((F4[::1], F4, F4[::1], F4))
def _pair_f32(values: Any, scale: Any, own: Any, own_scale: Any) -> None:
    for i in range(own.size):
        own[i] = own[i] * own_scale + values[i] * scale


@kernel((U2[::1], F4, F4[::1], F4, F4, F4, U2[::1]))
def _pair_f16(values: Any, scale: Any, own: Any, own_scale: Any, up: Any, down: Any, encoded: Any) -> None:
    for i in range(own.size):
        half = f32_to_f16((own[i] * own_scale + f16_to_f32(values[i]) * scale) * up)
        encoded[i] = half
        own[i] = f16_to_f32(half) * down


@kernel((U2[::1], F4, F4[::1], F4, U2[::1]))
def _pair_bf16(values: Any, scale: Any, own: Any, own_scale: Any, encoded: Any) -> None:
    for i in range(own.size):
        half = f32_to_bf16(own[i] * own_scale + bf16_to_f32(values[i]) * scale)
        encoded[i] = half
        own[i] = bf16_to_f32(half)


@kernel(
    (U2[::1], F4[::1], I8, I8, I8, F4[::1], I8, F4[::1], F4, F4, U2[::1]),
)
def _reduce(
    halves: Any,
    singles: Any,
    code: Any,
    stride: Any,
    header: Any,
    own: Any,
    own_index: Any,
    scales: Any,
    up: Any,
    down: Any,
    encoded: Any,
) -> None:
    total = np.empty(_BLOCK, np.float32)
    for start in range(0, own.size, _BLOCK):
        length = min(_BLOCK, own.size - start)
        block, own_block = total[:length], own[start : start + length]
        for r in range(scales.size):
            begin = r * stride + header + start
            if r == own_index:
                _add_f32(own_block, scales[r], block, r == 0)
            elif code == 0:
                _add_f32(singles[begin : begin + length], scales[r], block, r == 0)
            elif code == 1:
                _add_f16(halves[begin : begin + length], scales[r], block, r == 0)
            else:
                _add_bf16(halves[begin : begin + length], scales[r], block, r == 0)
        if code == 0:
            for i in range(length):
                own_block[i] = block[i]
        elif code == 1:
            encoded_block = encoded[start : start + length]
            for i in range(length):
                half = f32_to_f16(block[i] * up)
                encoded_block[i] = half
                own_block[i] = f16_to_f32(half) * down
        else:
            encoded_block = encoded[start : start + length]
            for i in range(length):
                half = f32_to_bf16(block[i])
                encoded_block[i] = half
                own_block[i] = bf16_to_f32(half)


@kernel((F4[::1], F4, U2[::1]))
def _encode_fp16(values: Any, scale: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = f32_to_f16(values[i] * scale)


@kernel((U2[::1], F4, F4[::1]))
def _decode_fp16(values: Any, scale: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = f16_to_f32(values[i]) * scale


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
    flat, item = rows.view(-1), encoded.element_size()
    weights = np.array([float(scale) for scale in scales], np.float32)
    factors = np.float32(float(up)), np.float32(float(down))
    if len(weights) == 2:
        # Two terms commute, so no partial sums are kept: a third less time than block by block.
        other = rows[1 - own_index, header_bytes : header_bytes + own.numel() * item]
        terms = _bits(other.view(encoded.dtype)), weights[1 - own_index], own.numpy(), weights[own_index]
        if encoded.dtype == torch.float32:
            _pair_f32(*terms)
        elif encoded.dtype == torch.float16:
            _pair_f16(*terms, *factors, _bits(encoded))
        else:
            _pair_bf16(*terms, _bits(encoded))
        return
    _reduce(
        flat.view(torch.uint16).numpy(),
        flat.view(torch.float32).numpy(),
        _CODES[encoded.dtype],
        rows.stride(0) // item,
        header_bytes // item,
        own.numpy(),
        own_index,
        weights,
        *factors,
        encoded.view(torch.uint16).numpy(),
    )


def _bits(values: Tensor) -> Any:
    """As an array that numba knows: 16-bit floats as the integers they are made of."""
    return (values if values.dtype == torch.float32 else values.view(torch.uint16)).numpy()


def encode_fp16(values: Tensor, scale: float | Tensor, out: Tensor) -> None:
    _encode_fp16(values.numpy(), np.float32(float(scale)), _bits(out))


def decode_fp16(values: Tensor, scale: float | Tensor, out: Tensor) -> None:
    _decode_fp16(_bits(values), np.float32(float(scale)), out.numpy())


def absmax(values: Tensor) -> Tensor:
    bits = int(_absmax(values.numpy()))
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)
