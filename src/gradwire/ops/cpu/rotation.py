"""Rotate blocks by random signs and a Hadamard matrix, in the first-level cache.

A pass over a block has eight lines in registers. The first pass mixes lines an eighth of the block apart, the
last one lines that are neighbours, and then the numbers within lines; decoding is the reverse. Blocks of 2048
and 4096 values need further passes between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import F4, LINE, Line, counting, largest_of, load, spread, store
from gradwire.ops.cpu.masks import sum_as_integers
from gradwire.ops.cpu.scalars import bits as bits_of
from gradwire.ops.cpu.scalars import flipped, from_bits, larger, random_word, shifted
from gradwire.ops.cpu.vectors import hidden, prefetch
from gradwire.ops.formats import SQUARE_UNITS

_SQUARE_UNITS, _SQUARE_UNIT = np.float32(SQUARE_UNITS), np.float32(1 / SQUARE_UNITS)
GROUP = 8 * LINE
"""Values of the lines that a pass has in registers."""


class Signs(NamedTuple):
    """Signs of a block: the place of its first value in the row, and the words of the sender's seed."""

    start: Any
    low: Any
    high: Any
    words: Any
    """Memory for random words: two lines for each 1024 values, in place of which a block may have fewer."""


def _mixing(strides: tuple[int, ...]) -> Any:
    """Make an intrinsic: return a line times a Hadamard matrix of 16 rows."""

    def function(typing_context: Any, line: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (value,) = args
            word = ir.VectorType(ir.IntType(32), LINE)
            of_lines = ir.FunctionType(value.type, [value.type] * 3)
            name = f"llvm.fmuladd.v{LINE}f32"
            multiply_add = cgutils.get_or_insert_function(builder.module, of_lines, name)
            for stride in strides:
                places = ir.Constant(word, [i ^ stride for i in range(LINE)])
                partner = builder.shuffle_vector(value, value, places)
                # A product with 1 or -1 is exact, so this is a sum or a difference.
                signs = ir.Constant(value.type, [-1.0 if i & stride else 1.0 for i in range(LINE)])
                value = builder.call(multiply_add, [value, signs, partner])
            return value

        return Line(F4)(Line(F4)), generate

    return intrinsic(function)


mixed_down = _mixing((8, 4, 2, 1))
mixed_up = _mixing((1, 2, 4, 8))


@helper
def mix_far(v: Any) -> Any:
    """Add and subtract lines that are four places apart."""
    a, b, c, d, e, f, g, h = v
    return a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h


@helper
def mix_middle(v: Any) -> Any:
    """Add and subtract lines that are two places apart."""
    a, b, c, d, e, f, g, h = v
    return a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h


@helper
def mix_near(v: Any) -> Any:
    """Add and subtract lines that are neighbours."""
    a, b, c, d, e, f, g, h = v
    return a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h


@helper
def load_lines(x: Any, i: Any, step: Any) -> Any:
    """Return eight lines that are ``step`` values apart."""
    return (
        load(x, i), load(x, i + step), load(x, i + 2 * step), load(x, i + 3 * step),
        load(x, i + 4 * step), load(x, i + 5 * step), load(x, i + 6 * step), load(x, i + 7 * step),
    )  # fmt: skip


@helper
def store_lines(x: Any, i: Any, step: Any, v: Any) -> None:
    a, b, c, d, e, f, g, h = v
    store(x, i, a)
    store(x, i + step, b)
    store(x, i + 2 * step, c)
    store(x, i + 3 * step, d)
    store(x, i + 4 * step, e)
    store(x, i + 5 * step, f)
    store(x, i + 6 * step, g)
    store(x, i + 7 * step, h)


@helper
def mix_between(x: Any, size: Any, stride: Any) -> None:
    """Mix lines that are ``stride`` values apart, in a pass of their own."""
    for start in range(0, size, 2 * stride):
        for i in range(start, start + stride, LINE):
            a, b = load(x, i), load(x, i + stride)
            store(x, i, a + b)
            store(x, i + stride, a - b)


@helper
def draw(signs: Any, size: Any) -> None:
    """Write the random words whose bits are the signs of a block: two lines of words for each 1024 values."""
    first = signs.start >> 10
    for group in range(first, ((signs.start + size - 1) >> 10) + 1):
        for half in range(0, 32, LINE):
            words = random_word(counting(group * 32 + half), signs.low, signs.high)
            store(signs.words, (group - first) * 32 + half, from_bits(words))


@helper
def _flipped(value: Any, signs: Any, i: Any) -> Any:
    """Return the line from value ``i`` of a block on with its random signs."""
    place = signs.start + i
    group = (place >> 10) - (signs.start >> 10)
    words = bits_of(load(signs.words, group * 32 + (i & LINE)))
    return flipped(value, words, np.int32((place >> 5) & 31))


@helper
def flip_lines(v: Any, signs: Any, i: Any, step: Any) -> Any:
    """Return lines that begin at value ``i`` of a block, ``step`` values apart, with their random signs."""
    a, b, c, d, e, f, g, h = v
    if step == 128:
        # The block is one group of words, and a line's bit is four places above that of the line before it.
        words = shifted(bits_of(load(signs.words, i & LINE)), np.int32(3 - (i >> 5)))
        return (
            flipped(a, words, np.int32(3)), flipped(b, words, np.int32(7)),
            flipped(c, words, np.int32(11)), flipped(d, words, np.int32(15)),
            flipped(e, words, np.int32(19)), flipped(f, words, np.int32(23)),
            flipped(g, words, np.int32(27)), flipped(h, words, np.int32(31)),
        )  # fmt: skip
    return (
        _flipped(a, signs, i), _flipped(b, signs, i + step),
        _flipped(c, signs, i + 2 * step), _flipped(d, signs, i + 3 * step),
        _flipped(e, signs, i + 4 * step), _flipped(f, signs, i + 5 * step),
        _flipped(g, signs, i + 6 * step), _flipped(h, signs, i + 7 * step),
    )  # fmt: skip


@helper
def _larger(largest: Any, v: Any) -> Any:
    for line in v:
        largest = larger(largest, line)
    return largest


@helper
def prefetch_part(ahead: Any, i: Any) -> None:
    """Prefetch half as many values as a pass has in registers, from ``i`` on."""
    for k in range(0, GROUP // 2, LINE):
        prefetch(ahead, i + k)


@helper
def scaled(v: Any, factor: Any) -> Any:
    a, b, c, d, e, f, g, h = v
    return (
        a * factor, b * factor, c * factor, d * factor, e * factor, f * factor, g * factor, h * factor
    )  # fmt: skip


@helper
def rotate(source: Any, ahead: Any, signs: Any, x: Any, size: Any, squares: Any) -> Any:
    """Write ``source`` to ``x``, with random signs, mixed except within groups of 128 values.

    Returns the bits of the largest magnitude. ``squares``, memory for an eighth of the block, receives the
    sums of the squares of every 32nd value. What lies ``ahead`` is prefetched, half a block of it.
    """
    draw(signs, size)
    step = size // 8
    largest = spread(np.int32(0))
    for j in range(0, hidden(step), LINE):
        prefetch_part(ahead, 4 * j)
        v = flip_lines(load_lines(source, j, step), signs, j, step)
        largest = _larger(largest, v)
        a, b, c, d, e, f, g, h = v
        even, odd = (a * a + e * e) + (c * c + g * g), (b * b + f * f) + (d * d + h * h)
        if step > LINE:
            store(squares, j, even + odd)
        else:
            store(squares, 0, even)
            store(squares, LINE, odd)
        store_lines(x, j, step, mix_near(mix_middle(mix_far(v))))
    width = step
    while width > 32:
        width //= 2
        for j in range(0, width, LINE):
            store(squares, j, load(squares, j) + load(squares, width + j))
    stride = step // 2
    while stride >= GROUP:
        mix_between(x, size, stride)
        stride //= 2
    return largest_of(largest)


@helper
def sum_of_squares(squares: Any, factor: Any) -> Any:
    """Return the sum of the squares that `rotate` leaves, of values times ``factor``, a power of two."""
    first, second = load(squares, 0) * factor * factor, load(squares, LINE) * factor * factor
    first, second = first * _SQUARE_UNITS, second * _SQUARE_UNITS
    return np.float32(sum_as_integers(first) + sum_as_integers(second)) * _SQUARE_UNIT
