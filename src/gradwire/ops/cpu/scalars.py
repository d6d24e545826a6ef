"""What numba lacks for one value: casts between formats, casts of bits, 32-bit arithmetic that stays so.

numba widens the integers of Python's operators to 64 bits, which halves the speed of vector code; each
function here is a few instructions of LLVM, inlined and vectorised with the loop around it.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic

I4, I8, F4, U1, U2 = numba.int32, numba.int64, numba.float32, numba.uint8, numba.uint16

_WORD = ir.IntType(32)
_ABS = 0x7FFFFFFF


def _word(value: int) -> ir.Constant:
    return ir.Constant(_WORD, value)


@intrinsic
def bits(typing_context: Any, value: Any) -> Any:
    """The bits of an fp32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _WORD)

    return I4(F4), generate


@intrinsic
def from_bits(typing_context: Any, value: Any) -> Any:
    """The fp32 of which these are the bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return F4(I4), generate


@intrinsic
def larger(typing_context: Any, largest: Any, value: Any) -> Any:
    """The larger of ``largest`` and the bits of ``|value|``.

    Without their sign bit, floats are ordered as integers are, infinity and NaN last.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magnitude = builder.and_(builder.bitcast(args[1], _WORD), _word(_ABS))
        return builder.select(builder.icmp_signed(">", magnitude, args[0]), magnitude, args[0])

    return I4(I4, F4), generate


@intrinsic
def low_byte(typing_context: Any, value: Any) -> Any:
    """The lowest 8 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.trunc(args[0], ir.IntType(8))

    return U1(I4), generate


@intrinsic
def pack(typing_context: Any, low: Any, high: Any) -> Any:
    """A byte of the lowest 4 bits of each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        low = builder.and_(args[0], ir.Constant(byte, 15))
        return builder.or_(low, builder.shl(args[1], ir.Constant(byte, 4)))

    return U1(U1, U1), generate


@intrinsic
def nibble(typing_context: Any, byte: Any, shift: Any) -> Any:
    """The signed 4-bit number at bit ``shift`` of a byte, as an fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.zext(args[0], _WORD)
        moved = builder.shl(word, builder.sub(_word(28), args[1]))
        return builder.sitofp(builder.ashr(moved, _word(28)), ir.FloatType())

    return F4(U1, I4), generate


@intrinsic
def signed_byte(typing_context: Any, byte: Any) -> Any:
    """A byte as a signed number, as an fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(builder.sext(args[0], _WORD), ir.FloatType())

    return F4(U1), generate


@intrinsic
def signs(
    typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, mask: Any
) -> Any:
    """A byte of eight sign bits, the first in its lowest bit, if ``mask`` is -1; 0 if it is 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *values, mask = args
        byte = _word(0)
        for place, value in enumerate(values):
            sign = builder.lshr(builder.bitcast(value, _WORD), _word(31))
            byte = builder.or_(byte, builder.shl(sign, _word(place)))
        return builder.trunc(builder.and_(byte, mask), ir.IntType(8))

    return U1(*[F4] * 8, I4), generate


@intrinsic
def with_sign(typing_context: Any, value: Any, byte: Any, position: Any) -> Any:
    """``value``, which is not negative, negated if the bit at ``position`` of the byte is set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.zext(args[1], _WORD)
        sign = builder.and_(builder.shl(word, builder.sub(_word(31), args[2])), _word(-0x80000000))
        return builder.bitcast(builder.or_(builder.bitcast(args[0], _WORD), sign), ir.FloatType())

    return F4(F4, U1, I4), generate


@intrinsic
def with_sign_of(typing_context: Any, magnitude: Any, value: Any, mask: Any) -> Any:
    """``magnitude``, which is not negative, with the sign of ``value``; without if ``mask`` is 0, not -1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sign = builder.and_(builder.bitcast(args[1], _WORD), _word(-0x80000000))
        word = builder.or_(builder.bitcast(args[0], _WORD), builder.and_(sign, args[2]))
        return builder.bitcast(word, ir.FloatType())

    return F4(F4, F4, I4), generate


def _mix(builder: Any, x: Any) -> Any:
    # lowbias32 of Chris Wellons' hash prospector: every input bit changes every output bit half the time.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        x = builder.xor(x, builder.lshr(x, _word(shift)))
        if factor is not None:
            x = builder.mul(x, _word(factor))
    return x


@intrinsic
def noise(typing_context: Any, index: Any, low: Any, high: Any) -> Any:
    """24 random bits for value ``index`` under a seed of two words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index = builder.trunc(args[0], _WORD)
        mixed = _mix(builder, builder.add(_mix(builder, builder.xor(index, args[1])), args[2]))
        return builder.lshr(mixed, _word(8))

    return I4(I8, I4, I4), generate


@intrinsic
def to_fp8(typing_context: Any, value: Any, rounding: Any, is_stochastic: Any) -> Any:
    """The e4m3 code of a value within ±448; ``rounding`` are 24 random bits, if they are used.

    A normal number's bits are rounded as integers; a subnormal one is a multiple of 2^-9.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        single = ir.FloatType()
        word = builder.bitcast(args[0], _WORD)
        sign = builder.and_(builder.lshr(word, _word(24)), _word(0x80))
        magnitude = builder.and_(word, _word(_ABS))
        is_odd = builder.and_(builder.lshr(magnitude, _word(20)), _word(1))
        nearest = builder.add(is_odd, _word(0x7FFFF))
        noise = builder.lshr(args[1], _word(4))
        bias = builder.select(args[2], noise, nearest)
        normal = builder.sub(builder.lshr(builder.add(magnitude, bias), _word(20)), _word(120 << 3))
        steps = builder.fmul(builder.bitcast(magnitude, single), ir.Constant(single, 512.0))
        fraction = builder.fsub(
            builder.fmul(builder.uitofp(args[1], single), ir.Constant(single, 2.0**-24)),
            ir.Constant(single, 0.5),
        )
        steps = builder.select(args[2], builder.fadd(steps, fraction), steps)
        shifted = builder.fadd(steps, ir.Constant(single, 1.5 * 2**23))
        subnormal = builder.and_(builder.bitcast(shifted, _WORD), _word(0xF))
        is_small = builder.icmp_signed("<", magnitude, _word(121 << 23))
        code = builder.select(is_small, subnormal, normal)
        code = builder.select(builder.icmp_signed(">", code, _word(0x7E)), _word(0x7E), code)
        return builder.trunc(builder.or_(code, sign), ir.IntType(8))

    return U1(F4, I4, numba.boolean), generate


@intrinsic
def from_fp8(typing_context: Any, code: Any) -> Any:
    """The value of an e4m3 code: by way of fp16, which has two bits more of exponent and keeps subnormals."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = ir.IntType(16)
        wide = builder.zext(args[0], half)
        sign = builder.shl(builder.and_(wide, ir.Constant(half, 0x80)), ir.Constant(half, 8))
        rest = builder.shl(builder.and_(wide, ir.Constant(half, 0x7F)), ir.Constant(half, 7))
        value = builder.fpext(builder.bitcast(builder.or_(sign, rest), ir.HalfType()), ir.FloatType())
        return builder.fmul(value, ir.Constant(ir.FloatType(), 256.0))

    return F4(U1), generate


def _widen_bf16(builder: Any, half: Any) -> Any:
    shifted = builder.shl(builder.zext(half, _WORD), _word(16))
    return builder.bitcast(shifted, ir.FloatType())


def _narrow_bf16(builder: Any, value: Any) -> Any:
    word = builder.bitcast(value, _WORD)
    is_odd = builder.and_(builder.lshr(word, _word(16)), _word(1))
    rounded = builder.lshr(builder.add(word, builder.add(is_odd, _word(0x7FFF))), _word(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _word(0x7FC0), rounded), ir.IntType(16))


@intrinsic
def bf16_to_f32(typing_context: Any, half: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widen_bf16(builder, args[0])

    return F4(U2), generate


@intrinsic
def f32_to_bf16(typing_context: Any, value: Any) -> Any:
    """To nearest, ties to even, as torch does; every NaN becomes the same one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _narrow_bf16(builder, args[0])

    return U2(F4), generate


@intrinsic
def half_to_f32(typing_context: Any, half: Any, is_bf16: Any) -> Any:
    """From the bits of a bf16 or an fp16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_f16 = builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return builder.select(args[1], _widen_bf16(builder, args[0]), from_f16)

    return F4(U2, numba.boolean), generate


@intrinsic
def f32_to_half(typing_context: Any, value: Any, is_bf16: Any) -> Any:
    """To the bits of a bf16 or an fp16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to_f16 = builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return builder.select(args[1], _narrow_bf16(builder, args[0]), to_f16)

    return U2(F4, numba.boolean), generate
