"""The kernels in numba, for fp32 values in host memory; one thread, without the GIL.

Importing this module compiles them (3 s), or reads them from numba's cache on disk (0.2 s).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

# Partial sums of this many values, 8 KiB, stay in the first-level cache beside what is added to them.
_BLOCK = 2048
_ABS = np.int32(0x7FFFFFFF)

_I4, _I8, _F4, _U2 = numba.int32, numba.int64, numba.float32, numba.uint16
_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _kernel(*signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            return numba.njit(*signature, cache=True, **options)(function)  # type: ignore[no-any-return]
        except RuntimeError:  # no folder to cache in can be written
            return numba.njit(*signature, **options)(function)  # type: ignore[no-any-return]

    return compiled


@intrinsic
def _bf16_to_f32(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        shifted = builder.shl(builder.zext(args[0], word), ir.Constant(word, 16))
        return builder.bitcast(shifted, ir.FloatType())

    return _F4(_U2), generate


@intrinsic
def _f32_to_bf16(typing_context: Any, value: Any) -> Any:
    """To nearest, ties to even, as torch does; every NaN becomes the same one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        is_odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        bias = builder.add(is_odd, ir.Constant(word, 0x7FFF))
        rounded = builder.lshr(builder.add(bits, bias), ir.Constant(word, 16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        chosen = builder.select(is_nan, ir.Constant(word, 0x7FC0), rounded)
        return builder.trunc(chosen, ir.IntType(16))

    return _U2(_F4), generate


@intrinsic
def _f16_to_f32(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return _F4(_U2), generate


@intrinsic
def _f32_to_f16(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return _U2(_F4), generate


@_kernel((_F4[::1], _F4, _F4[::1], numba.boolean))
def _add_f32(values: Any, scale: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = values[i] * scale
    else:
        for i in range(values.size):
            total[i] += values[i] * scale


@_kernel((_U2[::1], _F4, _F4[::1], numba.boolean))
def _add_f16(values: Any, scale: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = _f16_to_f32(values[i]) * scale
    else:
        for i in range(values.size):
            total[i] += _f16_to_f32(values[i]) * scale


@_kernel((_U2[::1], _F4, _F4[::1], numba.boolean))
def _add_bf16(values: Any, scale: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = _bf16_to_f32(values[i]) * scale
    else:
        for i in range(values.size):
            total[i] += _bf16_to_f32(values[i]) * scale


@_kernel((_F4[::1], _F4, _F4[::1], _F4))
def _pair_f32(values: Any, scale: Any, own: Any, own_scale: Any) -> None:
    for i in range(own.size):
        own[i] = own[i] * own_scale + values[i] * scale


@_kernel((_U2[::1], _F4, _F4[::1], _F4, _F4, _F4, _U2[::1]))
def _pair_f16(values: Any, scale: Any, own: Any, own_scale: Any, up: Any, down: Any, encoded: Any) -> None:
    for i in range(own.size):
        half = _f32_to_f16((own[i] * own_scale + _f16_to_f32(values[i]) * scale) * up)
        encoded[i] = half
        own[i] = _f16_to_f32(half) * down


@_kernel((_U2[::1], _F4, _F4[::1], _F4, _U2[::1]))
def _pair_bf16(values: Any, scale: Any, own: Any, own_scale: Any, encoded: Any) -> None:
    for i in range(own.size):
        half = _f32_to_bf16(own[i] * own_scale + _bf16_to_f32(values[i]) * scale)
        encoded[i] = half
        own[i] = _bf16_to_f32(half)


@_kernel(
    (_U2[::1], _F4[::1], _I8, _I8, _I8, _F4[::1], _I8, _F4[::1], _F4, _F4, _U2[::1]),
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
                half = _f32_to_f16(block[i] * up)
                encoded_block[i] = half
                own_block[i] = _f16_to_f32(half) * down
        else:
            encoded_block = encoded[start : start + length]
            for i in range(length):
                half = _f32_to_bf16(block[i])
                encoded_block[i] = half
                own_block[i] = _bf16_to_f32(half)


@_kernel((_F4[::1], _F4, _U2[::1]))
def _encode_fp16(values: Any, scale: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = _f32_to_f16(values[i] * scale)


@_kernel((_U2[::1], _F4, _F4[::1]))
def _decode_fp16(values: Any, scale: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = _f16_to_f32(values[i]) * scale


@_kernel((_I4[::1],))
def _absmax(bits: Any) -> Any:
    # Without their sign bit, floats are ordered as integers are, infinity and NaN last.
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & _ABS)
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
    bits = int(_absmax(values.view(torch.int32).numpy()))
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)
