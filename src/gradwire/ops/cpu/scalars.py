"""Arithmetic that numba lacks: casts between formats, access to bits, integers that stay 32 bits wide.

numba widens the results of Python's integer operators to 64 bits, which halves the speed of vector code. Each
function here is a few LLVM instructions, for a number or a line of them.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir

from gradwire.ops.cpu.lines import F4, I4, U1, U2, constant, elementwise, like

_BYTE, _HALF, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_F2, _F4 = ir.HalfType(), ir.FloatType()
# The bits of fp32's infinity. A value is finite if its bits, without the sign, are less.
INFINITY = 0x7F800000
_ABS = 0x7FFFFFFF
_SIGN = -0x80000000


def _bits(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, like(value, _WORD))


def _from_bits(builder: Any, word: Any) -> Any:
    return builder.bitcast(word, like(word, _F4))


@elementwise(I4, F4)
def bits(builder: Any, value: Any) -> Any:
    """Return the bits of an fp32 as an int32."""
    return _bits(builder, value)


@elementwise(F4, I4)
def from_bits(builder: Any, word: Any) -> Any:
    """Return the fp32 that has these bits."""
    return _from_bits(builder, word)


@elementwise(F4, F4)
def magnitude(builder: Any, value: Any) -> Any:
    """Return the value without its sign."""
    word = _bits(builder, value)
    return _from_bits(builder, builder.and_(word, constant(word, _ABS)))


@elementwise(I4, I4, F4)
def larger(builder: Any, largest: Any, value: Any) -> Any:
    """Return the larger of ``largest`` and the bits of ``|value|``.

    The bits of floats without a sign are ordered as integers, with infinity and NaN last.
    """
    word = _bits(builder, value)
    word = builder.and_(word, constant(word, _ABS))
    return builder.select(builder.icmp_signed(">", word, largest), word, largest)


@elementwise(F4, F4, F4)
def clamped(builder: Any, value: Any, limit: Any) -> Any:
    """Return the value clamped to ``-limit`` and ``limit``."""
    lowest = builder.fneg(limit)
    value = builder.select(builder.fcmp_ordered(">", value, limit), limit, value)
    return builder.select(builder.fcmp_ordered("<", value, lowest), lowest, value)


@elementwise(U1, I4)
def low_byte(builder: Any, word: Any) -> Any:
    """Return the lowest 8 bits."""
    return builder.trunc(word, like(word, _BYTE))


@elementwise(U1, I4, I4)
def pack_pair(builder: Any, low: Any, high: Any) -> Any:
    """Return a byte of the lowest 4 bits of each."""
    low = builder.and_(low, constant(low, 15))
    word = builder.or_(low, builder.shl(high, constant(high, 4)))
    return builder.trunc(word, like(word, _BYTE))


@elementwise(F4, U1, I4)
def nibble(builder: Any, byte: Any, shift: Any) -> Any:
    """Return the signed 4-bit number at bit ``shift`` of a byte, as an fp32."""
    word = builder.zext(byte, like(byte, _WORD))
    moved = builder.shl(word, builder.sub(constant(word, 28), shift))
    return builder.sitofp(builder.ashr(moved, constant(word, 28)), like(word, _F4))


@elementwise(F4, U1)
def signed_byte(builder: Any, byte: Any) -> Any:
    """Return a byte, read as a signed number, as an fp32."""
    word = builder.sext(byte, like(byte, _WORD))
    return builder.sitofp(word, like(byte, _F4))


@elementwise(F4, F4, U1, I4)
def with_sign(builder: Any, value: Any, byte: Any, place: Any) -> Any:
    """Return ``value``, not negative, with its sign set to bit ``place`` of the byte."""
    word = builder.zext(byte, like(byte, _WORD))
    moved = builder.shl(word, builder.sub(constant(word, 31), place))
    sign = builder.and_(moved, constant(word, _SIGN))
    return _from_bits(builder, builder.or_(_bits(builder, value), sign))


@elementwise(F4, F4, F4, I4)
def with_sign_of(builder: Any, magnitude: Any, value: Any, mask: Any) -> Any:
    """Return ``magnitude``, not negative, with the sign of ``value`` if ``mask`` is -1; itself if it is 0."""
    word = _bits(builder, value)
    sign = builder.and_(builder.and_(word, constant(word, _SIGN)), mask)
    return _from_bits(builder, builder.or_(_bits(builder, magnitude), sign))


@elementwise(I4, I4, F4, I4)
def add_sign(builder: Any, word: Any, value: Any, place: Any) -> Any:
    """Return ``word``, with bit ``place`` set if ``value`` has a sign."""
    sign = builder.lshr(_bits(builder, value), constant(word, 31))
    return builder.or_(word, builder.shl(sign, place))


@elementwise(I4, I4, I4)
def shifted(builder: Any, word: Any, num_places: Any) -> Any:
    """Return the word, shifted to the left."""
    return builder.shl(word, num_places)


@elementwise(F4, F4, I4, I4)
def flipped(builder: Any, value: Any, word: Any, place: Any) -> Any:
    """Return ``value``, negated if bit ``place`` of the word is set."""
    moved = builder.shl(word, builder.sub(constant(word, 31), place))
    sign = builder.and_(moved, constant(word, _SIGN))
    return _from_bits(builder, builder.xor(_bits(builder, value), sign))


def _mix(builder: Any, x: Any) -> Any:
    # lowbias32 of Chris Wellons' hash prospector: each input bit flips each output bit with probability 1/2.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        x = builder.xor(x, builder.lshr(x, constant(x, shift)))
        if factor is not None:
            x = builder.mul(x, constant(x, factor))
    return x


def _random_word(builder: Any, index: Any, low: Any, high: Any) -> Any:
    return _mix(builder, builder.add(_mix(builder, builder.xor(index, low)), high))


@elementwise(I4, I4, I4, I4)
def random_word(builder: Any, index: Any, low: Any, high: Any) -> Any:
    """Return 32 random bits for ``index`` under a seed of two words."""
    return _random_word(builder, index, low, high)


@elementwise(I4, I4, I4, I4)
def random_bits(builder: Any, index: Any, low: Any, high: Any) -> Any:
    """Return 24 random bits for value ``index`` under a seed of two words."""
    mixed = _random_word(builder, index, low, high)
    return builder.lshr(mixed, constant(mixed, 8))


def _centred(builder: Any, noise: Any) -> Any:
    share = builder.uitofp(noise, like(noise, _F4))
    share = builder.fmul(share, constant(share, 2.0**-24))
    return builder.fsub(share, constant(share, 0.5))


@elementwise(F4, I4)
def centred(builder: Any, noise: Any) -> Any:
    """Return 24 random bits as a number from -1/2 to 1/2."""
    return _centred(builder, noise)


@elementwise(U1, F4, I4, numba.boolean)
def to_fp8(builder: Any, value: Any, noise: Any, is_stochastic: Any) -> Any:
    """Return the e4m3 code of a value within ±448, rounded to nearest or with 24 random bits of ``noise``.

    The bits of a normal number are rounded as an integer. A subnormal number is a multiple of 2^-9.
    """
    word = _bits(builder, value)
    sign = builder.and_(builder.lshr(word, constant(word, 24)), constant(word, 0x80))
    magnitude = builder.and_(word, constant(word, _ABS))
    is_odd = builder.and_(builder.lshr(magnitude, constant(word, 20)), constant(word, 1))
    nearest = builder.add(is_odd, constant(word, 0x7FFFF))
    bias = builder.select(is_stochastic, builder.lshr(noise, constant(word, 4)), nearest)
    rounded = builder.lshr(builder.add(magnitude, bias), constant(word, 20))
    normal = builder.sub(rounded, constant(word, 120 << 3))
    steps = _from_bits(builder, magnitude)
    steps = builder.fmul(steps, constant(steps, 512.0))
    steps = builder.select(is_stochastic, builder.fadd(steps, _centred(builder, noise)), steps)
    shifted = builder.fadd(steps, constant(steps, 1.5 * 2**23))
    subnormal = builder.and_(_bits(builder, shifted), constant(word, 0xF))
    is_small = builder.icmp_signed("<", magnitude, constant(word, 121 << 23))
    code = builder.select(is_small, subnormal, normal)
    largest = constant(word, 0x7E)
    code = builder.select(builder.icmp_signed(">", code, largest), largest, code)
    return builder.trunc(builder.or_(code, sign), like(word, _BYTE))


@elementwise(F4, U1)
def from_fp8(builder: Any, code: Any) -> Any:
    """Return the value of an e4m3 code."""
    # By way of fp16, which has one bit more of exponent and represents e4m3's subnormals.
    wide = builder.zext(code, like(code, _HALF))
    sign = builder.shl(builder.and_(wide, constant(wide, 0x80)), constant(wide, 8))
    rest = builder.shl(builder.and_(wide, constant(wide, 0x7F)), constant(wide, 7))
    value = _widen_fp16(builder, builder.or_(sign, rest))
    return builder.fmul(value, constant(value, 256.0))


def _widen_fp16(builder: Any, half: Any) -> Any:
    return builder.fpext(builder.bitcast(half, like(half, _F2)), like(half, _F4))


def _widen_bf16(builder: Any, half: Any) -> Any:
    word = builder.zext(half, like(half, _WORD))
    return _from_bits(builder, builder.shl(word, constant(word, 16)))


def _narrow_bf16(builder: Any, value: Any) -> Any:
    word = _bits(builder, value)
    is_odd = builder.and_(builder.lshr(word, constant(word, 16)), constant(word, 1))
    bias = builder.add(is_odd, constant(word, 0x7FFF))
    rounded = builder.lshr(builder.add(word, bias), constant(word, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, constant(word, 0x7FC0), rounded), like(word, _HALF))


@elementwise(F4, U2)
def bf16_to_f32(builder: Any, half: Any) -> Any:
    """Return the value of a bf16, given its bits."""
    return _widen_bf16(builder, half)


@elementwise(U2, F4)
def f32_to_bf16(builder: Any, value: Any) -> Any:
    """Return the bits of the nearest bf16, ties to even, as torch does; all NaNs become the same one."""
    return _narrow_bf16(builder, value)


@elementwise(F4, U2, numba.boolean)
def half_to_f32(builder: Any, half: Any, is_bf16: Any) -> Any:
    """Return the value of a bf16 or an fp16, given its bits."""
    return builder.select(is_bf16, _widen_bf16(builder, half), _widen_fp16(builder, half))


@elementwise(U2, F4, numba.boolean)
def f32_to_half(builder: Any, value: Any, is_bf16: Any) -> Any:
    """Return the bits of the nearest bf16 or fp16."""
    half = builder.fptrunc(value, like(value, _F2))
    return builder.select(is_bf16, _narrow_bf16(builder, value), builder.bitcast(half, like(value, _HALF)))
