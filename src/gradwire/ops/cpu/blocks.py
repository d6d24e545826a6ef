"""Encodings with a scale per block in numba, for fp32 values in host memory.

Values are worked on in tiles that stay in the cache, so that main memory is read and written once; each
kernel does one simple thing to a tile, in loops that LLVM turns into vector code. Importing this module
compiles them, or reads them from numba's cache on disk.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gradwire.ops.cpu.scalars import (
    F4,
    I4,
    I8,
    U1,
    U2,
    bf16_to_f32,
    bits,
    f32_to_bf16,
    from_bits,
    from_fp8,
    kernel,
    larger,
    load,
    low_byte,
    merge,
    nibble,
    noise,
    pack,
    sign_at,
    signed_byte,
    store_as,
    to_fp8,
    with_sign,
)
from gradwire.ops.formats import KINDS, LIMITS, MIN_SCALE, BlockFormat, Seed

_INT8, _INT4, _SIGN, _FP8 = (KINDS[kind] for kind in ("int8", "int4", "sign", "fp8"))
# A multiple of every block; two tiles of fp32 take 64 KiB.
_TILE = 8192
_INFINITY = np.int32(0x7F800000)
_LARGEST_BF16 = np.int32(0x7F7F0000)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_UNIT = np.float32(2.0**-24)
_MIN_SCALE = np.float32(MIN_SCALE)
# Added to a number below 2^22, it leaves the nearest integer, ties to even, in the lowest bits.
_ROUND = np.float32(1.5 * 2**23)
_FIRST, _FOURTH = np.int32(0), np.int32(4)


@kernel((F4[::1], F4))
def _scale_of(values: Any, limit: Any) -> Any:
    """The scale that gives a block's largest magnitude the code ``limit``; NaN if a value is not finite."""
    largest = np.int32(0)
    for i in range(values.size):
        largest = larger(largest, values[i])
    # Rounded up to bf16, so that no code is beyond the limit.
    up = (bits(from_bits(largest) / limit) + np.int32(0xFFFF)) & np.int32(-0x10000)
    scale = max(from_bits(np.int32(up)), _MIN_SCALE)
    scale = scale if largest > 0 else _ZERO
    return scale if largest < _INFINITY else np.float32(np.nan)


@kernel((F4[::1], I8, F4, F4[::1], F4[::1]))
def _normalise(x: Any, block: Any, limit: Any, scales: Any, y: Any) -> None:
    """Find the blocks' scales, and ``y = x / scale``.

    In blocks of zeros, and in those that are not finite, ``x`` is multiplied by 0.
    """
    for b in range(scales.size):
        values, out = x[b * block : (b + 1) * block], y[b * block : (b + 1) * block]
        scale = _scale_of(values, limit)
        inverse = _ONE / scale if scale > _ZERO else _ZERO
        scales[b] = scale
        for i in range(values.size):
            out[i] = values[i] * inverse


@kernel((F4[::1], I8, F4[::1], F4[::1]))
def _scales_of_mean(x: Any, block: Any, lanes: Any, scales: Any) -> None:
    """A block's mean magnitude, in bf16; NaN if a value is not finite.

    Added up in an order that vector code can follow: by planes, then by halves.
    """
    for b in range(scales.size):
        at = b * block
        m = min(block, x.size - at)
        h = (m + 7) // 8
        part = np.float32(1.0) / np.float32(m)
        for j in range(lanes.size):
            lanes[j] = _ZERO
        for k in range(8):
            first = at + k * h
            plane = x[first : min(first + h, at + m)]
            for j in range(plane.size):
                lanes[j] += abs(plane[j]) * part
        width = lanes.size
        while width > 1:
            width >>= 1
            for j in range(width):
                lanes[j] += lanes[j + width]
        mean = bf16_to_f32(f32_to_bf16(lanes[0]))
        if bits(mean) == _INFINITY:  # the mean, of finite values or not, is beyond bf16
            largest = np.int32(0)
            for i in range(m):
                largest = larger(largest, x[at + i])
            mean = from_bits(_LARGEST_BF16) if largest < _INFINITY else np.float32(np.nan)
        scales[b] = mean


@kernel((F4[::1], F4, I8, I4, I4))
def _dither(y: Any, limit: Any, start: Any, low: Any, high: Any) -> None:
    """Add noise of one code's width, so that rounding to nearest is rounding by chance."""
    for i in range(y.size):
        dithered = y[i] + (np.float32(noise(start + i, low, high)) * _UNIT - _HALF)
        dithered = limit if dithered > limit else dithered
        y[i] = -limit if dithered < -limit else dithered


@kernel((F4[::1], U1[::1]))
def _pack_int8(y: Any, codes: Any) -> None:
    for i in range(y.size):
        codes[i] = low_byte(bits(y[i] + _ROUND))


@kernel((F4[::1], I8, U1[::1]))
def _pack_int4(y: Any, block: Any, codes: Any) -> None:
    half = block // 2
    num_full = y.size // block
    for b in range(num_full):
        firsts, seconds = y[b * block : b * block + half], y[b * block + half : (b + 1) * block]
        out = codes[b * half : (b + 1) * half]
        for j in range(half):
            out[j] = pack(bits(firsts[j] + _ROUND), bits(seconds[j] + _ROUND))
    tail, out = y[num_full * block :], codes[num_full * half :]
    h = (tail.size + 1) // 2
    for j in range(h):
        second = tail[h + j] if h + j < tail.size else _ZERO
        out[j] = pack(bits(tail[j] + _ROUND), bits(second + _ROUND))


@kernel((F4[::1], I8, F4[::1], U1[::1]))
def _pack_sign(x: Any, block: Any, scales: Any, codes: Any) -> None:
    eighth = block // 8
    for b in range(scales.size):
        at, m = b * block, min(block, x.size - b * block)
        h = (m + 7) // 8
        mask = np.int32(1) if scales[b] > _ZERO else np.int32(0)
        out = codes[b * eighth : b * eighth + h]
        for k in range(8):
            plane = x[at + k * h : min(at + (k + 1) * h, at + m)]
            if k == 0:
                for j in range(plane.size):
                    out[j] = sign_at(plane[j], mask, _FIRST)
            else:
                for j in range(plane.size):
                    out[j] = merge(out[j], sign_at(plane[j], mask, np.int32(k)))


@kernel((F4[::1], U1[::1], numba.boolean, I8, I4, I4))
def _pack_fp8(y: Any, codes: Any, dithered: Any, start: Any, low: Any, high: Any) -> None:
    if dithered:
        for i in range(y.size):
            codes[i] = to_fp8(y[i], noise(start + i, low, high), True)
    else:
        for i in range(y.size):
            codes[i] = to_fp8(y[i], _FIRST, False)


@kernel((F4[::1], I8, F4[::1]))
def _round(y: Any, block: Any, scales: Any) -> None:
    """``y = round(y) * scale``: what integer codes decode to."""
    for b in range(scales.size):
        values, scale = y[b * block : (b + 1) * block], scales[b]
        for i in range(values.size):
            values[i] = ((values[i] + _ROUND) - _ROUND) * scale


@kernel((F4[::1], I8, F4, F4[::1], U1[::1]))
def _encode_int8(x: Any, block: Any, limit: Any, scales: Any, codes: Any) -> None:
    """`_normalise` and `_pack_int8` in one, for when nothing else is wanted."""
    for b in range(scales.size):
        values, out = x[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scale = _scale_of(values, limit)
        inverse = _ONE / scale if scale > _ZERO else _ZERO
        scales[b] = scale
        for i in range(values.size):
            out[i] = low_byte(bits(values[i] * inverse + _ROUND))


@kernel((U1[::1], I8, F4[::1], F4[::1]))
def _unpack_int8(codes: Any, block: Any, scales: Any, y: Any) -> None:
    for b in range(scales.size):
        values, packed = y[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scale = scales[b]
        for i in range(values.size):
            values[i] = signed_byte(packed[i]) * scale


@kernel((U1[::1], I8, F4[::1], F4[::1]))
def _unpack_fp8(codes: Any, block: Any, scales: Any, y: Any) -> None:
    for b in range(scales.size):
        values, packed = y[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scale = scales[b]
        for i in range(values.size):
            values[i] = from_fp8(packed[i]) * scale


@kernel((U1[::1], I8, F4[::1], F4[::1]))
def _unpack_int4(codes: Any, block: Any, scales: Any, y: Any) -> None:
    half = block // 2
    for b in range(scales.size):
        m, scale = min(block, y.size - b * block), scales[b]
        h = (m + 1) // 2
        packed = codes[b * half : b * half + h]
        firsts = y[b * block : b * block + h]
        for j in range(firsts.size):
            firsts[j] = nibble(packed[j], _FIRST) * scale
        seconds = y[b * block + h : b * block + m]
        for j in range(seconds.size):
            seconds[j] = nibble(packed[j], _FOURTH) * scale


@kernel((U1[::1], I8, F4[::1], F4[::1]))
def _unpack_sign(codes: Any, block: Any, scales: Any, y: Any) -> None:
    for b in range(scales.size):
        values, scale = y[b * block : (b + 1) * block], scales[b]
        h = (values.size + 7) // 8
        packed = codes[b * (block // 8) : b * (block // 8) + h]
        for k in range(8):
            plane = values[k * h : (k + 1) * h]
            for j in range(plane.size):
                plane[j] = with_sign(scale, packed[j], np.int32(k))


@kernel((U2[::1], F4[::1]))
def _widen(halves: Any, singles: Any) -> None:
    for i in range(singles.size):
        singles[i] = bf16_to_f32(halves[i])


@kernel(
    (
        I8,
        I8,
        F4,
        numba.boolean,
        F4[::1],
        F4[::1],
        numba.boolean,
        F4[::1],
        F4[::1],
        U1[::1],
        U2[::1],
        I8,
        I4,
        I4,
    )
)
def _encode_tile(
    kind: Any,
    block: Any,
    limit: Any,
    dithered: Any,
    x: Any,
    y: Any,
    wants_y: Any,
    lanes: Any,
    scales: Any,
    codes: Any,
    halves: Any,
    start: Any,
    low: Any,
    high: Any,
) -> None:
    """Write the codes and scales of ``x``, values from ``start`` on of their run.

    ``y`` gets what they decode to, if that is wanted, and is overwritten in any case.
    """
    if kind == _SIGN:
        _scales_of_mean(x, block, lanes, scales)
        _pack_sign(x, block, scales, codes)
        if wants_y:
            _unpack_sign(codes, block, scales, y)
    elif kind == _INT8 and not dithered and not wants_y:
        _encode_int8(x, block, limit, scales, codes)
    else:
        _normalise(x, block, limit, scales, y)
        if kind == _FP8:
            _pack_fp8(y, codes, dithered, start, low, high)
        else:
            if dithered:
                _dither(y, limit, start, low, high)
            if kind == _INT8:
                _pack_int8(y, codes)
            else:
                _pack_int4(y, block, codes)
        if wants_y and kind == _FP8:
            _unpack_fp8(codes, block, scales, y)
        elif wants_y:
            _round(y, block, scales)
    for b in range(scales.size):
        halves[b] = f32_to_bf16(scales[b])


@kernel((I8, I8, U1[::1], F4[::1], F4[::1]))
def _decode_tile(kind: Any, block: Any, codes: Any, scales: Any, y: Any) -> None:
    if kind == _INT8:
        _unpack_int8(codes, block, scales, y)
    elif kind == _INT4:
        _unpack_int4(codes, block, scales, y)
    elif kind == _SIGN:
        _unpack_sign(codes, block, scales, y)
    else:
        _unpack_fp8(codes, block, scales, y)


def _residuals(*signature: Any) -> list[Any]:
    """The signature for residuals in fp32 and in bf16."""
    return [tuple(stored if arg is None else arg for arg in signature) for stored in (F4[::1], U2[::1])]


@kernel(_residuals(F4[::1], None, F4[::1]))
def _add_residual(values: Any, residual: Any, x: Any) -> None:
    for i in range(x.size):
        x[i] = values[i] + load(residual[i])


@kernel(_residuals(F4[::1], F4[::1], F4, I8, F4[::1], None))
def _keep(x: Any, y: Any, factor: Any, block: Any, scales: Any, residual: Any) -> None:
    """``residual = (x - y) * factor``, except in blocks that are not finite."""
    all_finite = True
    for b in range(scales.size):
        all_finite &= scales[b] >= _ZERO
    if all_finite:
        for i in range(x.size):
            residual[i] = store_as(residual[i], (x[i] - y[i]) * factor)
    else:
        for i in range(x.size):
            if scales[i // block] >= _ZERO:
                residual[i] = store_as(residual[i], (x[i] - y[i]) * factor)


@kernel((F4[::1], F4, F4[::1], numba.boolean))
def _add(values: Any, factor: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(values.size):
            total[i] = values[i] * factor
    else:
        for i in range(values.size):
            total[i] += values[i] * factor


@kernel(_residuals(I8, I8, I8, F4, numba.boolean, F4[::1], None, U1[::1], U2[::1], I4, I4))
def _encode(
    kind: Any,
    block: Any,
    per_byte: Any,
    limit: Any,
    dithered: Any,
    values: Any,
    residual: Any,
    codes: Any,
    halves: Any,
    low: Any,
    high: Any,
) -> None:
    x_tile, y_tile = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    lanes, scale_tile = np.empty(block // 8, np.float32), np.empty(_TILE // block, np.float32)
    for start in range(0, values.size, _TILE):
        tile = values[start : start + _TILE]
        first = start // block
        tile_halves = halves[first : first + _TILE // block]
        tile_codes = codes[start // per_byte : (start + _TILE) // per_byte]
        scales, y = scale_tile[: tile_halves.size], y_tile[: tile.size]
        if residual.size == 0:
            _encode_tile(
                kind,
                block,
                limit,
                dithered,
                tile,
                y,
                False,
                lanes,
                scales,
                tile_codes,
                tile_halves,
                start,
                low,
                high,
            )
        else:
            x, kept = x_tile[: tile.size], residual[start : start + _TILE]
            _add_residual(tile, kept, x)
            _encode_tile(
                kind,
                block,
                limit,
                dithered,
                x,
                y,
                True,
                lanes,
                scales,
                tile_codes,
                tile_halves,
                start,
                low,
                high,
            )
            _keep(x, y, _ONE, block, scales, kept)


@kernel((I8, I8, I8, U1[::1], U2[::1], F4[::1]))
def _decode(kind: Any, block: Any, per_byte: Any, codes: Any, halves: Any, values: Any) -> None:
    scale_tile = np.empty(_TILE // block, np.float32)
    for start in range(0, values.size, _TILE):
        tile = values[start : start + _TILE]
        first = start // block
        tile_halves = halves[first : first + _TILE // block]
        scales = scale_tile[: tile_halves.size]
        _widen(tile_halves, scales)
        _decode_tile(kind, block, codes[start // per_byte : (start + _TILE) // per_byte], scales, tile)


@kernel(
    _residuals(
        I8,
        I8,
        I8,
        F4,
        numba.boolean,
        U1[:, ::1],
        U2[:, ::1],
        I8,
        F4[::1],
        I8,
        F4,
        F4,
        None,
        U1[::1],
        U2[::1],
        I4,
        I4,
    )
)
def _reduce(
    kind: Any,
    block: Any,
    per_byte: Any,
    limit: Any,
    dithered: Any,
    rows: Any,
    row_halves: Any,
    first_scale: Any,
    own: Any,
    own_index: Any,
    factor: Any,
    inverse: Any,
    residual: Any,
    codes: Any,
    halves: Any,
    low: Any,
    high: Any,
) -> None:
    x_tile, y_tile = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    lanes, scale_tile = np.empty(block // 8, np.float32), np.empty(_TILE // block, np.float32)
    for start in range(0, own.size, _TILE):
        tile = own[start : start + _TILE]
        first = start // block
        tile_halves = halves[first : first + _TILE // block]
        at, end = start // per_byte, (start + _TILE) // per_byte
        scales, x, y = scale_tile[: tile_halves.size], x_tile[: tile.size], y_tile[: tile.size]
        kept = residual[start : start + _TILE]
        for r in range(rows.shape[0]):
            if r != own_index:
                begin = first_scale + first
                _widen(row_halves[r, begin : begin + scales.size], scales)
                _decode_tile(kind, block, rows[r, at:end], scales, y)
                _add(y, factor, x, r == 0)
            elif residual.size == 0:
                _add(tile, factor, x, r == 0)
            else:
                _add_residual(tile, kept, y)
                _add(y, factor, x, r == 0)
        _encode_tile(
            kind,
            block,
            limit,
            dithered,
            x,
            tile,
            True,
            lanes,
            scales,
            codes[at:end],
            tile_halves,
            start,
            low,
            high,
        )
        if residual.size:
            _keep(x, tile, inverse, block, scales, kept)


def encode(form: BlockFormat, values: Tensor, residual: Tensor | None, row: Tensor, seed: Seed) -> None:
    codes, scales = form.split(row, values.numel())
    _encode(*_numbers(form), values.numpy(), _stored(residual), codes.numpy(), _halves(scales), *_words(seed))


def decode(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    codes, scales = form.split(row, values.numel())
    _decode(*_numbers(form)[:3], codes.numpy(), _halves(scales), values.numpy())


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
    factor = float(scale)
    _reduce(
        *_numbers(form),
        rows.numpy(),
        _halves(rows),
        form.scales_offset(own.numel()) // 2,
        own.numpy(),
        own_index,
        np.float32(factor),
        np.float32(1 / factor),
        _stored(residual),
        codes.numpy(),
        _halves(scales),
        *_words(seed),
    )


def _numbers(form: BlockFormat) -> tuple[Any, ...]:
    limit = np.float32(LIMITS.get(form.kind, 0.0))
    return KINDS[form.kind], form.block, form.values_per_byte, limit, form.stochastic


_NOTHING = np.empty(0, np.float32)


def _stored(residual: Tensor | None) -> Any:
    if residual is None:
        return _NOTHING
    return _halves(residual) if residual.dtype == torch.bfloat16 else residual.numpy()


def _halves(values: Tensor) -> Any:
    return values.view(torch.uint16).numpy()


def _words(seed: Seed) -> tuple[Any, Any]:
    return np.uint32(seed.low).astype(np.int32), np.uint32(seed.high).astype(np.int32)
