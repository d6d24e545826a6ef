"""A block's values to codes, for each encoding with a scale per block.

A block is worked on in whole lines. Unless its bytes make whole lines, its ``m`` values ``x`` lie before 31
zeros or more, and where results go there is as much room behind them; where planes overlap, a result is
written twice, and is the same. What comes ``to`` a block are its codes and, unless ``only_codes`` are
wanted, what they decode to, and what they leave out, times ``factor``. ``coming`` is fetched meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import LINE, counting, largest_of, load, spread, store, sum_by_halves
from gradwire.ops.cpu.scalars import (
    INFINITY,
    add_sign,
    bf16_to_f32,
    bits,
    centred,
    clamped,
    f32_to_bf16,
    from_bits,
    from_fp8,
    larger,
    low_byte,
    magnitude,
    noise,
    pack_pair,
    to_fp8,
    with_sign_of,
)
from gradwire.ops.cpu.unpacking import FP8, INT4, SIGN
from gradwire.ops.cpu.vectors import prefetch
from gradwire.ops.formats import MIN_SCALE

_INFINITY = np.int32(INFINITY)
_LARGEST_BF16 = np.int32(0x7F7F0000)
_ZERO, _ONE = np.float32(0), np.float32(1)
_NAN = np.float32(np.nan)
_MIN_SCALE = np.float32(MIN_SCALE)
# Added to a number below 2^22, it leaves the nearest integer, ties to even, in the lowest bits.
_ROUND = np.float32(1.5 * 2**23)


@helper
def _largest(x: Any, m: Any, coming: Any) -> Any:
    """The bits of the largest magnitude; at least those of infinity if a value is not finite."""
    largest = spread(np.int32(0))
    for i in range(0, m, LINE):
        prefetch(coming, i)
        largest = larger(largest, load(x, i))
    return largest_of(largest)


@helper
def _scale_of(x: Any, m: Any, limit: Any, coming: Any) -> Any:
    """The scale that gives the largest magnitude the code ``limit``; NaN if a value is not finite."""
    largest = _largest(x, m, coming)
    # Rounded up to bf16, so that no code is beyond the limit.
    up = (bits(from_bits(largest) / limit) + np.int32(0xFFFF)) & np.int32(-0x10000)
    scale = max(from_bits(np.int32(up)), _MIN_SCALE)
    scale = scale if largest > 0 else _ZERO
    return scale if largest < _INFINITY else _NAN


@helper
def _mean_of(x: Any, m: Any, lanes: Any, num_lanes: Any, coming: Any) -> Any:
    """The mean magnitude of a block, in bf16; NaN if a value is not finite.

    Added up in an order that vector code can follow: by planes, then by halves.
    """
    h = (m + 7) // 8
    share = _ONE / np.float32(m)
    for j in range(0, h, LINE):
        total = spread(_ZERO)
        for k in range(8):
            prefetch(coming, k * h + j)
            total = total + magnitude(load(x, k * h + j)) * share
        store(lanes, j, total)
    for j in range(h, num_lanes):
        lanes[j] = _ZERO
    width = num_lanes
    while width > LINE:
        width >>= 1
        for j in range(0, width, LINE):
            store(lanes, j, load(lanes, j) + load(lanes, width + j))
    mean = bf16_to_f32(f32_to_bf16(sum_by_halves(load(lanes, 0))))
    if bits(mean) >= _INFINITY:  # of finite values or not, it is beyond bf16
        mean = from_bits(_LARGEST_BF16) if _largest(x, m, coming) < _INFINITY else _NAN
    return mean


@helper
def _keep(x: Any, decoded: Any, factor: Any, sent: Any, left: Any, at: Any) -> None:
    store(sent, at, decoded)
    store(left, at, (x - decoded) * factor)


@helper
def _rounded(x: Any, inverse: Any, limit: Any, chance: Any, at: Any) -> Any:
    """The nearest integers, in the lowest bits; with noise of a code's width added, one of two by chance."""
    dithered, start, low, high = chance
    y = x * inverse
    if dithered:
        y = clamped(y + centred(noise(counting(start + at), low, high)), limit)
    return y + _ROUND


@helper
def _pack_bytes(
    x: Any, m: Any, scale: Any, limit: Any, only_codes: Any, to: Any, factor: Any, coming: Any, chance: Any
) -> None:
    codes, sent, left = to
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    for i in range(0, m, LINE):
        prefetch(coming, i)
        value = load(x, i)
        rounded = _rounded(value, inverse, limit, chance, i)
        store(codes, i, low_byte(bits(rounded)))
        if not only_codes:
            _keep(value, (rounded - _ROUND) * scale, factor, sent, left, i)


@helper
def _pack_nibbles(
    x: Any, m: Any, scale: Any, limit: Any, only_codes: Any, to: Any, factor: Any, coming: Any, chance: Any
) -> None:
    codes, sent, left = to
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    h = (m + 1) // 2
    for j in range(0, h, LINE):
        prefetch(coming, j)
        prefetch(coming, h + j)
        first, second = load(x, j), load(x, h + j)
        rounded = _rounded(first, inverse, limit, chance, j)
        rounded_second = _rounded(second, inverse, limit, chance, h + j)
        store(codes, j, pack_pair(bits(rounded), bits(rounded_second)))
        if not only_codes:
            _keep(first, (rounded - _ROUND) * scale, factor, sent, left, j)
            _keep(second, (rounded_second - _ROUND) * scale, factor, sent, left, h + j)


@helper
def _pack_fp8(
    x: Any, m: Any, scale: Any, only_codes: Any, to: Any, factor: Any, coming: Any, chance: Any
) -> None:
    codes, sent, left = to
    dithered, start, low, high = chance
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    for i in range(0, m, LINE):
        prefetch(coming, i)
        value = load(x, i)
        if dithered:
            code = to_fp8(value * inverse, noise(counting(start + i), low, high), True)
        else:
            code = to_fp8(value * inverse, np.int32(0), False)
        store(codes, i, code)
        if not only_codes:
            _keep(value, from_fp8(code) * scale, factor, sent, left, i)


@helper
def _pack_signs(x: Any, m: Any, scale: Any, only_codes: Any, to: Any, factor: Any, coming: Any) -> None:
    codes, sent, left = to
    mask = np.int32(-1) if scale > _ZERO else np.int32(0)
    h = (m + 7) // 8
    for j in range(0, h, LINE):
        byte = spread(np.int32(0))
        for k in range(8):
            prefetch(coming, k * h + j)
            value = load(x, k * h + j)
            decoded = with_sign_of(scale, value, mask)
            byte = add_sign(byte, decoded, np.int32(k))
            if not only_codes:
                _keep(value, decoded, factor, sent, left, k * h + j)
        store(codes, j, low_byte(byte))


@helper
def pack(
    kind: Any, limit: Any, x: Any, m: Any, lanes: Any, num_lanes: Any, only_codes: Any, to: Any, factor: Any,
    coming: Any, coming_kept: Any, chance: Any,
) -> Any:  # fmt: skip
    """The scale that was taken. Where it is NaN, so is all that is sent, and what is left stays as it is."""
    scale = _mean_of(x, m, lanes, num_lanes, coming) if kind == SIGN else _scale_of(x, m, limit, coming)
    if not scale >= _ZERO:
        for i in range(m):
            to[1][i] = _NAN
    elif kind == SIGN:
        _pack_signs(x, m, scale, only_codes, to, factor, coming_kept)
    elif kind == INT4:
        _pack_nibbles(x, m, scale, limit, only_codes, to, factor, coming_kept, chance)
    elif kind == FP8:
        _pack_fp8(x, m, scale, only_codes, to, factor, coming_kept, chance)
    else:
        _pack_bytes(x, m, scale, limit, only_codes, to, factor, coming_kept, chance)
    return scale
