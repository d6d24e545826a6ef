"""Rotate blocks by random signs and a Hadamard matrix, and round them to levels, in the first-level cache.

A block has at least 128 values, and a plane of its bits at least 16 bytes: all of this is whole lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import F4, LINE, Line, counting, load, spread, store, sum_by_halves
from gradwire.ops.cpu.scalars import (
    above_or_below,
    add_above,
    add_sign,
    clamped,
    flipped,
    from_bits,
    low_byte,
    magnitude,
    random_word,
    set_or_not,
    with_sign,
)
from gradwire.ops.cpu.scalars import bits as bits_of
from gradwire.ops.formats import GAUSSIAN_BOUNDS, GAUSSIAN_LEVELS

_LOW_2, _HIGH_2 = map(np.float32, GAUSSIAN_LEVELS[2])
_BOUND_2 = np.float32(GAUSSIAN_BOUNDS[2][0])
_FIRST_3, _SECOND_3, _THIRD_3, _FOURTH_3 = map(np.float32, GAUSSIAN_LEVELS[3])
_INNER_3, _MIDDLE_3, _OUTER_3 = map(np.float32, GAUSSIAN_BOUNDS[3])
_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST = np.float32(np.finfo(np.float32).max)
# No value overflows if its scale is smaller: it is the scale times a sum of 4096 levels at most.
_LARGE = np.float32(_LARGEST / 2**14)


class Signs(NamedTuple):
    """Signs of a block: the place of its first value in the row, and the words of the sender's seed."""

    start: Any
    low: Any
    high: Any
    words: Any
    """Memory for random words: a line for each 32 lines of a block, and one more."""


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
        of_lines = ir.FunctionType(value.type, [value.type] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, of_lines, f"llvm.fmuladd.v{LINE}f32")
        for stride in (8, 4, 2, 1):
            places = ir.Constant(word, [i ^ stride for i in range(LINE)])
            partner = builder.shuffle_vector(value, value, places)
            # A product with 1 or -1 is exact, so this is a sum or a difference.
            signs = ir.Constant(value.type, [-1.0 if i & stride else 1.0 for i in range(LINE)])
            value = builder.call(multiply_add, [value, signs, partner])
        return value

    return Line(F4)(Line(F4)), generate


@helper
def _store_mixed(
    x: Any, i: Any, step: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any
) -> None:
    """Multiply eight lines by a Hadamard matrix of 8 rows, and store them ``step`` values apart."""
    a, b, c, d, e, f, g, h = a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h
    a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
    store(x, i, a + b)
    store(x, i + step, a - b)
    store(x, i + 2 * step, c + d)
    store(x, i + 3 * step, c - d)
    store(x, i + 4 * step, e + f)
    store(x, i + 5 * step, e - f)
    store(x, i + 6 * step, g + h)
    store(x, i + 7 * step, g - h)


@helper
def mix_lines(x: Any, size: Any) -> None:
    """Multiply a block by the part of a Hadamard matrix that mixes lines, without its three largest strides.

    The largest strides come first. Each pass over the block takes three, two or one of them.
    """
    stride = size // 16
    while stride >= 4 * LINE:
        step = stride // 4
        for start in range(0, size, 2 * stride):
            for i in range(start, start + step, LINE):
                a, b, c, d = load(x, i), load(x, i + step), load(x, i + 2 * step), load(x, i + 3 * step)
                e, f = load(x, i + 4 * step), load(x, i + 5 * step)
                g, h = load(x, i + 6 * step), load(x, i + 7 * step)
                _store_mixed(x, i, step, a, b, c, d, e, f, g, h)
        stride //= 8
    if stride == 2 * LINE:
        for i in range(0, size, 4 * LINE):
            a, b, c, d = load(x, i), load(x, i + LINE), load(x, i + 2 * LINE), load(x, i + 3 * LINE)
            a, b, c, d = a + c, b + d, a - c, b - d
            store(x, i, a + b)
            store(x, i + LINE, a - b)
            store(x, i + 2 * LINE, c + d)
            store(x, i + 3 * LINE, c - d)
    if stride == LINE:
        for i in range(0, size, 2 * LINE):
            a, b = load(x, i), load(x, i + LINE)
            store(x, i, a + b)
            store(x, i + LINE, a - b)


@helper
def _draw(signs: Any, size: Any) -> None:
    """Write the random words whose bits are the signs of a block: a line of words for each 32 lines."""
    first, last = signs.start // LINE, (signs.start + size) // LINE - 1
    for group in range(first >> 5, (last >> 5) + 1):
        words = random_word(counting(group * LINE), signs.low, signs.high)
        store(signs.words, (group - (first >> 5)) * LINE, from_bits(words))


@helper
def _flipped(value: Any, signs: Any, i: Any) -> Any:
    """Return the line from value ``i`` of a block on with its random signs."""
    first, line = signs.start // LINE, (signs.start + i) // LINE
    words = bits_of(load(signs.words, ((line >> 5) - (first >> 5)) * LINE))
    return flipped(value, words, np.int32(line & 31))


@helper
def flip(source: Any, factor: Any, signs: Any, x: Any, size: Any) -> None:
    """Write ``source * factor``, with random signs, to ``x``, mixed by the three largest strides."""
    _draw(signs, size)
    h = size // 8
    for j in range(0, h, LINE):
        _store_mixed(
            x,
            j,
            h,
            _flipped(load(source, j) * factor, signs, j),
            _flipped(load(source, h + j) * factor, signs, h + j),
            _flipped(load(source, 2 * h + j) * factor, signs, 2 * h + j),
            _flipped(load(source, 3 * h + j) * factor, signs, 3 * h + j),
            _flipped(load(source, 4 * h + j) * factor, signs, 4 * h + j),
            _flipped(load(source, 5 * h + j) * factor, signs, 5 * h + j),
            _flipped(load(source, 6 * h + j) * factor, signs, 6 * h + j),
            _flipped(load(source, 7 * h + j) * factor, signs, 7 * h + j),
        )


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
def _quantise(bits: Any, x: Any, size: Any, square: Any, codes: Any) -> Any:
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
def quantise(bits: Any, x: Any, size: Any, square: Any, codes: Any) -> Any:
    """Pack the codes of a rotated block, and return its sums."""
    # The number of bits is a constant in each, so that the loops have no branches.
    if bits == 1:
        return _quantise(1, x, size, square, codes)
    if bits == 2:
        return _quantise(2, x, size, square, codes)
    return _quantise(3, x, size, square, codes)


@helper
def _level(bits: Any, codes: Any, h: Any, j: Any, k: Any) -> Any:
    """Return the levels of one plane from value ``j`` on, with signs."""
    place = np.int32(k)
    level = spread(_ONE)
    if bits == 2:
        level = set_or_not(load(codes, h + j), place, _HIGH_2, _LOW_2)
    elif bits == 3:
        first, second = load(codes, h + j), load(codes, 2 * h + j)
        low = set_or_not(second, place, _SECOND_3, _FIRST_3)
        level = set_or_not(first, place, set_or_not(second, place, _FOURTH_3, _THIRD_3), low)
    return with_sign(level, load(codes, j), place)


@helper
def _dequantise(bits: Any, codes: Any, size: Any, x: Any) -> None:
    """Write the levels of packed codes to ``x``, mixed by the three largest strides, those between planes."""
    h = size // 8
    for j in range(0, h, LINE):
        _store_mixed(
            x,
            j,
            h,
            _level(bits, codes, h, j, 0),
            _level(bits, codes, h, j, 1),
            _level(bits, codes, h, j, 2),
            _level(bits, codes, h, j, 3),
            _level(bits, codes, h, j, 4),
            _level(bits, codes, h, j, 5),
            _level(bits, codes, h, j, 6),
            _level(bits, codes, h, j, 7),
        )


@helper
def decode_block(bits: Any, codes: Any, size: Any, scale: Any, signs: Any, x: Any) -> None:
    """Write the values of packed codes to ``x``."""
    if bits == 1:
        _dequantise(1, codes, size, x)
    elif bits == 2:
        _dequantise(2, codes, size, x)
    else:
        _dequantise(3, codes, size, x)
    mix_lines(x, size)
    _draw(signs, size)
    for i in range(0, size, LINE):
        store(x, i, _flipped(_mixed(load(x, i)) * scale, signs, i))
    if scale > _LARGE:
        for i in range(0, size, LINE):
            store(x, i, clamped(load(x, i), _LARGEST))
