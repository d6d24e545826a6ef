"""Scales and codes of blocks, in Triton."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from gradwire.ops.formats import KINDS, LIMITS, MIN_SCALE, BlockFormat

_SIGN = tl.constexpr(KINDS["sign"])
_FP8 = tl.constexpr(KINDS["fp8"])
INFINITY = tl.constexpr(0x7F800000)
_LARGEST_BF16 = tl.constexpr(0x7F7F0000)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_ROUND = tl.constexpr(1.5 * 2**23)
ABS = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class Tile:
    """The values that one program works on, as one compile-time constant of a kernel.

    A tile has the shape (``planes``, ``num_blocks``, ``width``).
    """

    kind: int
    limit: float
    stochastic: bool
    bits: int
    planes: int
    """Values in a byte."""
    block: int
    """Values in a block."""
    width: int
    """Bytes in a block."""
    num_blocks: int

    @classmethod
    @functools.cache
    def of(cls, form: BlockFormat, num_blocks: int) -> Tile:
        return cls(
            kind=KINDS[form.kind],
            limit=LIMITS.get(form.kind, 1.0),
            stochastic=form.stochastic,
            bits=8 // form.values_per_byte,
            planes=form.values_per_byte,
            block=form.block,
            width=form.block // form.values_per_byte,
            num_blocks=num_blocks,
        )


@triton.jit
def to_bf16(word):
    """Round an fp32, given by its bits, to bf16: to nearest, ties to even. The lower 16 bits become 0."""
    return (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_word(index, seed):
    """Return 32 random bits for each index."""
    low, high = seed
    return _mix(_mix(index.to(tl.uint32) ^ low.to(tl.uint32)) + high.to(tl.uint32))


@triton.jit
def _noise(index, seed):
    """Return 24 random bits for each index."""
    return (random_word(index, seed) >> 8).to(tl.int32)


@triton.jit
def scales_of(x, m, TILE: tl.constexpr):
    """Return the scale of each block of the tile ``x``, (1, block, 1); a block has ``m`` values."""
    magnitude = x.to(tl.int32, bitcast=True) & ABS
    largest = tl.max(tl.max(magnitude, axis=0, keep_dims=True), axis=2, keep_dims=True)
    if TILE.kind == _SIGN:
        part = tl.div_rn(1.0, tl.cast(m, tl.float32))
        mean = tl.sum(tl.sum(tl.abs(x) * part, axis=0, keep_dims=True), axis=2, keep_dims=True)
        # Clamped to the largest finite number.
        word = to_bf16(mean.to(tl.int32, bitcast=True))
        scale = tl.minimum(word, _LARGEST_BF16).to(tl.float32, bitcast=True)
    else:
        quotient = tl.div_rn(largest.to(tl.float32, bitcast=True), TILE.limit)
        up = (quotient.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        scale = tl.maximum(up.to(tl.float32, bitcast=True), _MIN_SCALE)
        scale = tl.where(largest == 0, 0.0, scale)
    return tl.where(largest < INFINITY, scale, float("nan"))


@triton.jit
def _to_fp8(y, noise, TILE: tl.constexpr):
    word = y.to(tl.int32, bitcast=True)
    magnitude = word & ABS
    steps = magnitude.to(tl.float32, bitcast=True) * 512.0
    if TILE.stochastic:
        normal = ((magnitude + (noise >> 4)) >> 20) - (120 << 3)
        steps += noise.to(tl.float32) * (2.0**-24) - 0.5
    else:
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (steps + _ROUND).to(tl.int32, bitcast=True) & 0xF
    code = tl.minimum(tl.where(magnitude < (121 << 23), subnormal, normal), 0x7E)
    return code | ((word >> 24) & 0x80)


@triton.jit
def from_codes(code, scale, TILE: tl.constexpr):
    """Return the values of codes, whose higher bits do not matter."""
    if TILE.kind == _SIGN:
        return (scale.to(tl.int32, bitcast=True) ^ (code << 31)).to(tl.float32, bitcast=True)
    elif TILE.kind == _FP8:
        # The bits of e4m3, moved to those of fp32, are a number 2^-120 times as large.
        tiny = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        return tiny * (2.0**120) * scale
    else:
        signed = (code << (32 - TILE.bits)) >> (32 - TILE.bits)
        return signed.to(tl.float32) * scale


@triton.jit
def from_codes_times(code, scale, factor, TILE: tl.constexpr):
    """Return ``from_codes(code, scale) * factor``, rounded after each product."""
    if TILE.kind == _SIGN:
        return from_codes(code, scale * factor, TILE)  # the same result, with one product per block
    else:
        return from_codes(code, scale, TILE) * factor


@triton.jit
def to_codes(x, scale, index, seed, TILE: tl.constexpr):
    """Return codes, whose higher bits are undefined, and what they decode to."""
    if TILE.kind == _SIGN:
        # A block of zeros has no signs, so that it decodes to exact zeros.
        code = (x.to(tl.int32, bitcast=True) >> 31) & tl.where(scale > 0, 1, 0)
        return code, from_codes(code, scale, TILE)
    else:
        y = x * tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
        noise = tl.zeros_like(y).to(tl.int32)
        if TILE.stochastic:
            noise = _noise(index, seed)
        if TILE.kind == _FP8:
            code = _to_fp8(y, noise, TILE)
            return code, from_codes(code, scale, TILE)
        else:
            if TILE.stochastic:
                y += noise.to(tl.float32) * (2.0**-24) - 0.5
                y = tl.minimum(tl.maximum(y, -TILE.limit), TILE.limit)
            # The lowest bits of so large a number are an integer: the code.
            rounded = y + _ROUND
            return rounded.to(tl.int32, bitcast=True), (rounded - _ROUND) * scale
