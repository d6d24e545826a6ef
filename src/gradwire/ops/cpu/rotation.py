"""Rotate blocks by random signs and a Hadamard matrix, and round them to levels, in the first-level cache.

A block has at least 128 values, and a plane of its bits at least 16 bytes: all of this is whole lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import F4, LINE, Line, counting, load, spread, store, sum_by_halves
from gradwire.ops.cpu.scalars import (
    above_or_below,
    add_above,
    add_sign,
    clamped,
    flipped,
    low_byte,
    magnitude,
    random_word,
    set_or_not,
    with_sign,
)
from gradwire.ops.formats import GAUSSIAN_BOUNDS, GAUSSIAN_LEVELS

_LOW_2, _HIGH_2 = map(np.float32, GAUSSIAN_LEVELS[2])
_BOUND_2 = np.float32(GAUSSIAN_BOUNDS[2][0])
_FIRST_3, _SECOND_3, _THIRD_3, _FOURTH_3 = map(np.float32, GAUSSIAN_LEVELS[3])
_INNER_3, _MIDDLE_3, _OUTER_3 = map(np.float32, GAUSSIAN_BOUNDS[3])
_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST = np.float32(np.finfo(np.float32).max)


class Signs(NamedTuple):
    """Signs of a block: the place of its first value in the row, and the words of the sender's seed."""

    start: Any
    low: Any
    high: Any


class Sums(NamedTuple):
    """Sums over a block: of squares, of magnitudes times their levels, and of squares of levels."""

    square: Any
    product: Any
    norm: Any


@intrinsic
def _mixed(typing_context: Any, line: Any) -> Any:
    """Return the line times a Hadamard matrix of 16 rows; the largest strides come first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,) = args
        word = ir.VectorType(ir.IntType(32), LINE)
        for stride in (8, 4, 2, 1):
            places = ir.Constant(word, [i ^ stride for i in range(LINE)])
            partner = builder.shuffle_vector(value, value, places)
            mask = ir.Constant(word, [-0x80000000 if i & stride else 0 for i in range(LINE)])
            signed = builder.bitcast(builder.xor(builder.bitcast(value, word), mask), value.type)
            value = builder.fadd(partner, signed)
        return value

    return Line(F4)(Line(F4)), generate


@helper
def mix_lines(x: Any, size: Any) -> None:
    """Multiply a block by the part of a Hadamard matrix that mixes lines; the largest strides come first."""
    stride = size // 2
    while stride >= 2 * LINE:  # two strides at a time
        half = stride // 2
        for start in range(0, size, 2 * stride):
            for i in range(start, start + half, LINE):
                a, b = load(x, i), load(x, i + half)
                c, d = load(x, i + stride), load(x, i + stride + half)
                e, f, g, h = a + c, b + d, a - c, b - d
                store(x, i, e + f)
                store(x, i + half, e - f)
                store(x, i + stride, g + h)
                store(x, i + stride + half, g - h)
        stride //= 4
    if stride == LINE:
        for i in range(0, size, 2 * LINE):
            a, b = load(x, i), load(x, i + LINE)
            store(x, i, a + b)
            store(x, i + LINE, a - b)


@helper
def _words(line: Any, signs: Any) -> Any:
    """Return the random words whose bits are the signs of 32 lines, ``line`` among them."""
    return random_word(counting((line >> 5) * LINE), signs.low, signs.high)


@helper
def flip(source: Any, factor: Any, signs: Any, x: Any, size: Any) -> None:
    """Write ``source * factor``, with random signs, to ``x``."""
    first = signs.start // LINE
    words = _words(first, signs)
    for k in range(size // LINE):
        line = first + k
        if line & 31 == 0:
            words = _words(line, signs)
        store(x, k * LINE, flipped(load(source, k * LINE) * factor, words, np.int32(line & 31)))


@helper
def mix_within_lines(x: Any, size: Any) -> Any:
    """Multiply a block by the rest of the Hadamard matrix, and return the sum of squares."""
    total = spread(_ZERO)
    for i in range(0, size, LINE):
        line = _mixed(load(x, i))
        total = total + line * line
        store(x, i, line)
    return sum_by_halves(total)


@helper
def quantise(bits: Any, x: Any, size: Any, square: Any, codes: Any) -> Any:
    """Pack the codes of a rotated block, and return its sums."""
    h = size // 8
    deviation = np.sqrt(square * (_ONE / np.float32(size)))
    product, norm = spread(_ZERO), spread(_ZERO)
    for j in range(0, h, LINE):
        signs, first, second = spread(np.int32(0)), spread(np.int32(0)), spread(np.int32(0))
        for k in range(8):
            place = np.int32(k)
            value = load(x, k * h + j)
            size_ = magnitude(value)
            signs = add_sign(signs, value, place)
            if bits == 1:
                level = spread(_ONE)
            elif bits == 2:
                bound = deviation * _BOUND_2
                first = add_above(first, size_, bound, place)
                level = above_or_below(size_, bound, spread(_HIGH_2), _LOW_2)
            else:
                inner, middle = spread(deviation * _INNER_3), deviation * _MIDDLE_3
                outer = spread(deviation * _OUTER_3)
                first = add_above(first, size_, middle, place)
                second = add_above(second, size_, above_or_below(size_, middle, outer, inner), place)
                low = above_or_below(size_, inner, spread(_SECOND_3), _FIRST_3)
                high = above_or_below(size_, outer, spread(_FOURTH_3), _THIRD_3)
                level = above_or_below(size_, middle, high, low)
            product = product + size_ * level
            norm = norm + level * level
        store(codes, j, low_byte(signs))
        if bits > 1:
            store(codes, h + j, low_byte(first))
        if bits > 2:
            store(codes, 2 * h + j, low_byte(second))
    return Sums(square, sum_by_halves(product), sum_by_halves(norm))


@helper
def dequantise(bits: Any, codes: Any, size: Any, x: Any) -> None:
    """Write the levels of packed codes to ``x``."""
    h = size // 8
    for j in range(0, h, LINE):
        signs = load(codes, j)
        if bits == 1:
            for k in range(8):
                store(x, k * h + j, with_sign(_ONE, signs, np.int32(k)))
        elif bits == 2:
            first = load(codes, h + j)
            for k in range(8):
                level = set_or_not(first, np.int32(k), _HIGH_2, _LOW_2)
                store(x, k * h + j, with_sign(level, signs, np.int32(k)))
        else:
            first, second = load(codes, h + j), load(codes, 2 * h + j)
            for k in range(8):
                low = set_or_not(second, np.int32(k), _SECOND_3, _FIRST_3)
                high = set_or_not(second, np.int32(k), _FOURTH_3, _THIRD_3)
                level = set_or_not(first, np.int32(k), high, low)
                store(x, k * h + j, with_sign(level, signs, np.int32(k)))


@helper
def rotate_back(x: Any, size: Any, scale: Any, signs: Any) -> None:
    """Turn the levels of a block into its values, in place."""
    mix_lines(x, size)
    first = signs.start // LINE
    words = _words(first, signs)
    for k in range(size // LINE):
        line = first + k
        if line & 31 == 0:
            words = _words(line, signs)
        value = flipped(_mixed(load(x, k * LINE)) * scale, words, np.int32(line & 31))
        store(x, k * LINE, clamped(value, _LARGEST))
