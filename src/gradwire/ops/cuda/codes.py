"""What Triton programs do with the values of blocks: scales, and codes and back."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.ops.formats import KINDS, MIN_SCALE

_SIGN = tl.constexpr(KINDS["sign"])
_FP8 = tl.constexpr(KINDS["fp8"])
_INFINITY = tl.constexpr(0x7F800000)
_LARGEST_BF16 = tl.constexpr(0x7F7F0000)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_ROUND = tl.constexpr(1.5 * 2**23)
_ABS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def to_bf16(word):
    """The bits of an fp32 rounded to bf16, to nearest, ties to even, in the place of its higher half."""
    return (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(index, low, high):
    """24 random bits for each index."""
    mixed = _mix(_mix(index.to(tl.uint32) ^ low.to(tl.uint32)) + high.to(tl.uint32))
    return (mixed >> 8).to(tl.int32)


@triton.jit
def scales_of(x, m, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """The scale of each block of the tile ``x``, of shape (1, block, 1); a block has ``m`` values."""
    magnitude = x.to(tl.int32, bitcast=True) & _ABS
    largest = tl.max(tl.max(magnitude, axis=0, keep_dims=True), axis=2, keep_dims=True)
    if KIND == _SIGN:
        part = tl.div_rn(1.0, tl.cast(m, tl.float32))
        mean = tl.sum(tl.sum(tl.abs(x) * part, axis=0, keep_dims=True), axis=2, keep_dims=True)
        # Not beyond the largest finite number.
        word = to_bf16(mean.to(tl.int32, bitcast=True))
        scale = tl.minimum(word, _LARGEST_BF16).to(tl.float32, bitcast=True)
    else:
        quotient = tl.div_rn(largest.to(tl.float32, bitcast=True), LIMIT)
        up = (quotient.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        scale = tl.maximum(up.to(tl.float32, bitcast=True), _MIN_SCALE)
        scale = tl.where(largest == 0, 0.0, scale)
    return tl.where(largest < _INFINITY, scale, float("nan"))


@triton.jit
def _to_fp8(y, noise, DITHERED: tl.constexpr):
    word = y.to(tl.int32, bitcast=True)
    magnitude = word & _ABS
    steps = magnitude.to(tl.float32, bitcast=True) * 512.0
    if DITHERED:
        normal = ((magnitude + (noise >> 4)) >> 20) - (120 << 3)
        steps += noise.to(tl.float32) * (2.0**-24) - 0.5
    else:
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (steps + _ROUND).to(tl.int32, bitcast=True) & 0xF
    code = tl.minimum(tl.where(magnitude < (121 << 23), subnormal, normal), 0x7E)
    return code | ((word >> 24) & 0x80)


@triton.jit
def from_codes(code, scale, KIND: tl.constexpr, BITS: tl.constexpr):
    """Values from codes, whose higher bits do not matter."""
    if KIND == _SIGN:
        return (scale.to(tl.int32, bitcast=True) ^ (code << 31)).to(tl.float32, bitcast=True)
    elif KIND == _FP8:
        # The bits of e4m3 in those of fp32 make a number 2^-120 times as large.
        tiny = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        return tiny * (2.0**120) * scale
    else:
        signed = (code << (32 - BITS)) >> (32 - BITS)
        return signed.to(tl.float32) * scale


@triton.jit
def from_codes_times(code, scale, factor, KIND: tl.constexpr, BITS: tl.constexpr):
    """``from_codes(code, scale) * factor``, rounded twice."""
    if KIND == _SIGN:
        return from_codes(code, scale * factor, KIND, BITS)  # the same number, once a block
    else:
        return from_codes(code, scale, KIND, BITS) * factor


@triton.jit
def to_codes(
    x, scale, index, low, high,
    KIND: tl.constexpr, LIMIT: tl.constexpr, DITHERED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Codes, whose higher bits may be anything, and what they decode to."""
    if KIND == _SIGN:
        # Zeros have no sign, so that a block of them decodes to exact zeros.
        code = (x.to(tl.int32, bitcast=True) >> 31) & tl.where(scale > 0, 1, 0)
        return code, from_codes(code, scale, KIND, BITS)
    else:
        y = x * tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
        noise = tl.zeros_like(y).to(tl.int32)
        if DITHERED:
            noise = _noise(index, low, high)
        if KIND == _FP8:
            code = _to_fp8(y, noise, DITHERED)
            return code, from_codes(code, scale, KIND, BITS)
        else:
            if DITHERED:
                y += noise.to(tl.float32) * (2.0**-24) - 0.5
                y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
            # In so large a number the lowest bits are an integer, the code.
            rounded = y + _ROUND
            return rounded.to(tl.int32, bitcast=True), (rounded - _ROUND) * scale
