"""Tiles of values to codes, for each encoding with a scale per block.

A tile is some blocks, all of them full but the last of a run, and stays in the first-level cache. Behind the
values ``x`` of a tile lie at least seven zeros, so that the last byte of a short block needs no case of its
own. Unless ``only_codes`` are wanted, ``sent`` gets what they decode to, and ``left`` what they leave out,
times ``factor``; in blocks that are not finite, ``left`` stays as it is. ``coming`` is fetched while the tile
is worked on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.scalars import (
    bf16_to_f32,
    bits,
    f32_to_bf16,
    from_bits,
    from_fp8,
    larger,
    low_byte,
    noise,
    pack,
    signs,
    to_fp8,
    with_sign_of,
)
from gradwire.ops.cpu.vectors import LINE, fetch, part, sum_by_halves
from gradwire.ops.formats import MIN_SCALE

_INFINITY = np.int32(0x7F800000)
_LARGEST_BF16 = np.int32(0x7F7F0000)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_NAN = np.float32(np.nan)
_UNIT = np.float32(2.0**-24)
_MIN_SCALE = np.float32(MIN_SCALE)
# Added to a number below 2^22, it leaves the nearest integer, ties to even, in the lowest bits.
_ROUND = np.float32(1.5 * 2**23)
_NO_NOISE = np.int32(0)


@helper
def _largest(values: Any) -> Any:
    """The bits of the largest magnitude; at least those of infinity if a value is not finite."""
    largest = np.int32(0)
    for i in range(values.size):
        largest = larger(largest, values[i])
    return largest


@helper
def _scale_of(values: Any, limit: Any) -> Any:
    """The scale that gives the largest magnitude the code ``limit``; NaN if a value is not finite."""
    largest = _largest(values)
    # Rounded up to bf16, so that no code is beyond the limit.
    up = (bits(from_bits(largest) / limit) + np.int32(0xFFFF)) & np.int32(-0x10000)
    scale = max(from_bits(np.int32(up)), _MIN_SCALE)
    scale = scale if largest > 0 else _ZERO
    return scale if largest < _INFINITY else _NAN


@helper
def _mean_of(x: Any, at: Any, m: Any, lanes: Any) -> Any:
    """The mean magnitude of a block, in bf16; NaN if a value is not finite.

    Added up in an order that vector code can follow: by planes, then by halves.
    """
    h = (m + 7) // 8
    share = _ONE / np.float32(m)
    p0, p1, p2, p3 = part(x, at, h), part(x, at + h, h), part(x, at + 2 * h, h), part(x, at + 3 * h, h)
    rest = at + 4 * h
    p4, p5, p6, p7 = (
        part(x, rest, h),
        part(x, rest + h, h),
        part(x, rest + 2 * h, h),
        part(x, rest + 3 * h, h),
    )
    for j in range(h):
        total = abs(p0[j]) * share + abs(p1[j]) * share
        total = total + abs(p2[j]) * share + abs(p3[j]) * share
        total = total + abs(p4[j]) * share + abs(p5[j]) * share
        lanes[j] = total + abs(p6[j]) * share + abs(p7[j]) * share
    for j in range(h, lanes.size):
        lanes[j] = _ZERO
    width = lanes.size
    while width > LINE:
        width >>= 1
        low, high = part(lanes, 0, width), part(lanes, width, width)
        for j in range(width):
            low[j] += high[j]
    mean = bf16_to_f32(f32_to_bf16(sum_by_halves(lanes)))
    if bits(mean) >= _INFINITY:  # of finite values or not, it is beyond bf16
        mean = from_bits(_LARGEST_BF16) if _largest(part(x, at, m)) < _INFINITY else _NAN
    return mean


@helper
def _round(
    x: Any, scale: Any, limit: Any, codes: Any, sent: Any, left: Any, factor: Any,
    dithered: Any, start: Any, low: Any, high: Any,
) -> None:  # fmt: skip
    """To integers; with noise of one code's width added, rounding to nearest is rounding by chance."""
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    if dithered:
        for i in range(x.size):
            y = x[i] * inverse + (np.float32(noise(start + i, low, high)) * _UNIT - _HALF)
            y = limit if y > limit else y
            rounded = (-limit if y < -limit else y) + _ROUND
            codes[i] = low_byte(bits(rounded))
            sent[i] = (rounded - _ROUND) * scale
            left[i] = (x[i] - (rounded - _ROUND) * scale) * factor
    else:
        for i in range(x.size):
            rounded = x[i] * inverse + _ROUND
            codes[i] = low_byte(bits(rounded))
            sent[i] = (rounded - _ROUND) * scale
            left[i] = (x[i] - (rounded - _ROUND) * scale) * factor


@helper
def _round_alone(x: Any, scale: Any, codes: Any) -> None:
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    for i in range(x.size):
        codes[i] = low_byte(bits(x[i] * inverse + _ROUND))


@helper
def _round_to_fp8(
    x: Any, scale: Any, only_codes: Any, codes: Any, sent: Any, left: Any, factor: Any,
    dithered: Any, start: Any, low: Any, high: Any,
) -> None:  # fmt: skip
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    if dithered:
        for i in range(x.size):
            codes[i] = to_fp8(x[i] * inverse, noise(start + i, low, high), True)
    else:
        for i in range(x.size):
            codes[i] = to_fp8(x[i] * inverse, _NO_NOISE, False)
    if not only_codes:
        for i in range(x.size):
            decoded = from_fp8(codes[i]) * scale
            sent[i] = decoded
            left[i] = (x[i] - decoded) * factor


@helper
def _poison(sent: Any) -> None:
    for i in range(sent.size):
        sent[i] = _NAN


@helper
def pack_bytes(
    is_fp8: Any, only_codes: Any, x: Any, size: Any, block: Any, limit: Any, codes: Any, halves: Any,
    sent: Any, left: Any, factor: Any, coming: Any, coming_kept: Any,
    dithered: Any, start: Any, low: Any, high: Any,
) -> None:  # fmt: skip
    """Codes of a byte each, for ``int8``, ``fp8`` and, not yet packed, ``int4``."""
    for b in range(halves.size):
        at, m = b * block, min(block, size - b * block)
        fetch(coming, at, block)
        fetch(coming_kept, at, block)
        values, out, sent_, left_ = part(x, at, m), part(codes, at, m), part(sent, at, m), part(left, at, m)
        scale = _scale_of(values, limit)
        halves[b] = f32_to_bf16(scale)
        if not scale >= _ZERO:
            _poison(sent_)
        elif is_fp8:
            _round_to_fp8(
                values, scale, only_codes, out, sent_, left_, factor, dithered, start + at, low, high
            )
        elif only_codes and not dithered:
            _round_alone(values, scale, out)
        else:
            _round(values, scale, limit, out, sent_, left_, factor, dithered, start + at, low, high)


@helper
def pack_nibbles(wide: Any, size: Any, block: Any, codes: Any) -> None:
    """Two codes of a byte each in one; behind the last of them lies a zero."""
    for b in range((size + block - 1) // block):
        at, h = b * block, (min(block, size - b * block) + 1) // 2
        firsts, seconds, out = part(wide, at, h), part(wide, at + h, h), part(codes, b * (block // 2), h)
        for j in range(h):
            out[j] = pack(firsts[j], seconds[j])


@helper
def pack_signs(
    only_codes: Any, x: Any, size: Any, block: Any, lanes: Any, codes: Any, halves: Any,
    sent: Any, left: Any, factor: Any, coming: Any, coming_kept: Any,
) -> None:  # fmt: skip
    for b in range(halves.size):
        at, m = b * block, min(block, size - b * block)
        fetch(coming, at, block)
        fetch(coming_kept, at, block)
        scale = _mean_of(x, at, m, lanes)
        halves[b] = f32_to_bf16(scale)
        mask = np.int32(-1) if scale > _ZERO else np.int32(0)
        h = (m + 7) // 8
        out, rest = part(codes, b * (block // 8), h), at + 4 * h
        p0, p1, p2, p3 = part(x, at, h), part(x, at + h, h), part(x, at + 2 * h, h), part(x, at + 3 * h, h)
        p4, p5, p6, p7 = (
            part(x, rest, h),
            part(x, rest + h, h),
            part(x, rest + 2 * h, h),
            part(x, rest + 3 * h, h),
        )
        for j in range(h):
            out[j] = signs(p0[j], p1[j], p2[j], p3[j], p4[j], p5[j], p6[j], p7[j], mask)
        values, sent_, left_ = part(x, at, m), part(sent, at, m), part(left, at, m)
        if not scale >= _ZERO:
            _poison(sent_)
        elif not only_codes:
            for i in range(m):
                decoded = with_sign_of(scale, values[i], mask)
                sent_[i] = decoded
                left_[i] = (values[i] - decoded) * factor
