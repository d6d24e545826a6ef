"""Rotations by random signs and a Hadamard matrix, and levels of rotated values, in Triton.

A program works on one block, as rows of 32 values. Triton deals out threads from the last axis on, so a
thread has a column: it mixes rows without the help of other threads, and the signs of its values are bits of
one word. Values change hands once, when the block is transposed. A thread then has 32 neighbours, whose bits
make up one word of each plane.

The last block may be shorter. It is worked on as a full one with zeros behind it. Adding zeros changes
nothing, and what is computed beyond the end is neither added up nor written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from gradwire.ops.cuda.codes import INFINITY, random_word
from gradwire.ops.formats import (
    GAUSSIAN_LEVELS,
    INTEGER_BOUNDS,
    LEAST_SAFE,
    MEAN_SQUARE_4,
    MIN_SCALE,
    MOST_SAFE,
    PART,
    SQUARE_UNITS,
    RotatedFormat,
)

_SIGN = tl.constexpr(-0x80000000)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LEAST_SAFE = tl.constexpr(LEAST_SAFE)
_MOST_SAFE = tl.constexpr(MOST_SAFE)
# No value overflows if its scale is smaller: it is the scale times a sum of 4096 levels at most.
_LARGE = tl.constexpr(3.4028234663852886e38 / 2**14)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_UNITS = tl.constexpr(1 / PART)
_MEAN_SQUARE_4 = tl.constexpr(MEAN_SQUARE_4)
_SQUARE_UNITS = tl.constexpr(SQUARE_UNITS)
# A number that is added to this one is rounded to an integer, in the lowest bits.
_ROUND = tl.constexpr(2.0**23)
_ROUND_BITS = tl.constexpr(0x4B000000)


@dataclass(frozen=True)
class RotatedTile:
    """A `RotatedFormat`, as one compile-time constant of a kernel."""

    bits: int
    unbiased: bool
    rows: int
    """Rows in a block, of 32 values each."""
    log_rows: int
    levels: tuple[float, ...]
    """Levels without signs."""
    bounds: tuple[int, ...]
    """Bounds between levels, in parts of a deviation."""

    @classmethod
    @functools.cache
    def of(cls, form: RotatedFormat) -> RotatedTile:
        rows, levels, bounds = form.block // 32, GAUSSIAN_LEVELS[form.bits], INTEGER_BOUNDS[form.bits]
        return cls(form.bits, form.unbiased, rows, rows.bit_length() - 1, levels, bounds)


@triton.jit
def _pairs(x, STRIDE: tl.constexpr):
    """Return the lower and the upper rows of all pairs that are ``STRIDE`` apart."""
    pairs = tl.reshape(x, (x.shape[0] // (2 * STRIDE), 2, STRIDE, x.shape[1]))
    return tl.split(tl.permute(pairs, (0, 2, 3, 1)))


@triton.jit
def _mixed_once(x, STRIDE: tl.constexpr):
    low, high = _pairs(x, STRIDE)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 3, 1, 2)), x.shape)


@triton.jit
def _mixed(x, LOG: tl.constexpr, LARGEST_FIRST: tl.constexpr):
    """Multiply each column, of ``2**LOG`` values, by a Hadamard matrix."""
    for step in tl.static_range(LOG):
        x = _mixed_once(x, 1 << (LOG - 1 - step if LARGEST_FIRST else step))
    return x


@triton.jit
def _square(x, units, LOG: tl.constexpr):
    """Return the sum of squares of a block with ``2**LOG`` rows, in whole ``units``."""
    x *= x
    for step in tl.static_range(LOG):
        low, high = _pairs(x, 1 << (LOG - 1 - step))
        x = tl.reshape(low + high, (1 << (LOG - 1 - step), 32))
    # The sums of columns are added as integers: in any order, the result is the same. They have less than 50
    # bits. A warp adds up 32 bits in one instruction, so they are added in two parts.
    x *= units
    high = (x * 2.0**-24).to(tl.int32)
    low = (x - high.to(tl.float32) * 2.0**24).to(tl.int32)
    return ((tl.sum(high).to(tl.int64) << 24) + tl.sum(low)).to(tl.float32)


@triton.jit
def _random_words(block, seed, TILE: tl.constexpr):
    """Return the words (group, 1, column) whose bits are the random signs of a block."""
    groups: tl.constexpr = max(TILE.rows // 32, 1)
    group = (block * TILE.rows >> 5) + tl.arange(0, groups)[:, None, None]
    words = random_word(group * 32 + tl.arange(0, 32)[None, None, :], seed)
    return words.to(tl.int32, bitcast=True)


@triton.jit
def _flipped(x, words, block, TILE: tl.constexpr):
    """Return a block with random signs."""
    rows: tl.constexpr = min(TILE.rows, 32)
    place = (block * TILE.rows & 31).to(tl.int32) + tl.arange(0, rows)[None, :, None]
    if TILE.rows >= 32:
        place = tl.arange(0, rows)[None, :, None]  # the same, known when this is compiled
    signs = tl.reshape((words << (31 - place)) & _SIGN, x.shape)
    return (x.to(tl.int32, bitcast=True) ^ signs).to(tl.float32, bitcast=True)


@triton.jit
def _among(first, second, a, b, c, d):
    """Return the numbers to which two bits lead: 00 to ``a``, 01 to ``b`` and so on."""
    return tl.where(first, tl.where(second, d, c), tl.where(second, b, a))


@triton.jit
def decoded(words, scale, block, seed, size, TILE: tl.constexpr):
    """Return the values (row, column) of a block of ``size`` values, from a word for each plane and row."""
    place = tl.arange(0, 32)[:, None]
    exists = tl.arange(0, TILE.rows)[None, :] * 32 < size
    level = tl.where(exists, TILE.levels[0], 0.0)
    if TILE.bits == 2:
        level = tl.where((words[1] & (1 << place)) != 0, tl.where(exists, TILE.levels[1], 0.0), level)
    if TILE.bits == 3:
        is_odd = (words[2] & (1 << place)) != 0
        level = tl.where(is_odd, tl.where(exists, TILE.levels[1], 0.0), level)
        upper = tl.where(exists, TILE.levels[2], 0.0)
        upper = tl.where(is_odd, tl.where(exists, TILE.levels[3], 0.0), upper)
        level = tl.where((words[1] & (1 << place)) != 0, upper, level)
    if TILE.bits == 4:
        first, second = (words[1] & (1 << place)) != 0, (words[2] & (1 << place)) != 0
        third = (words[3] & (1 << place)) != 0
        x: tl.constexpr = TILE.levels
        odd = _among(first, second, x[1], x[3], x[5], x[7])
        level = tl.where(third, odd, _among(first, second, x[0], x[2], x[4], x[6]))
        level = tl.where(exists, level, 0.0)
    sign = (words[0] << (31 - place)) & _SIGN
    x = (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    x = tl.trans(_mixed(x, 5, False))
    x = _flipped(_mixed(x, TILE.log_rows, False) * scale, _random_words(block, seed, TILE), block, TILE)
    if scale > _LARGE:
        # Clamped in this way, a NaN stays.
        x = tl.where(x > _LARGEST, _LARGEST, x)
        x = tl.where(x < -_LARGEST, -_LARGEST, x)
    return x


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _word(bits):
    """Join the bits of each column, which are in their places already, to one word."""
    return tl.reduce(bits, 0, _either, keep_dims=True)


@triton.jit
def _num_bits(words):
    """Return the number of ones in each word, as Warren counts them in *Hacker's Delight*."""
    words = words.to(tl.uint32, bitcast=True)
    words -= (words >> 1) & 0x55555555
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return ((((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _alternating(x):
    """Return the even and the odd rows."""
    pairs = tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1]))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def _eighths(x):
    """Return eight tensors, each of every eighth row."""
    a, b = _alternating(x)
    a, c = _alternating(a)
    b, d = _alternating(b)
    a, e = _alternating(a)
    b, f = _alternating(b)
    c, g = _alternating(c)
    d, h = _alternating(d)
    return a, b, c, d, e, f, g, h


@triton.jit
def _signs(eighths):
    """Join the sign bits of each column of 32 values to one word."""
    word = eighths[7].to(tl.uint32, bitcast=True) >> 31
    for i in tl.static_range(7):
        # A shift of two registers, which is one instruction. To compare, choose a bit and add it takes three.
        word = (word << 1) | (eighths[6 - i].to(tl.uint32, bitcast=True) >> 31)
    return _word(word.to(tl.int32, bitcast=True) << (8 * tl.arange(0, 4)[:, None]))


@triton.jit
def _above(rounded, total, bound, TILE: tl.constexpr):
    """Return a word for each row, of the parts that are above a bound; their number; and their sum."""
    under = _eighths(tl.cast(bound + _ROUND, tl.float32) - rounded)
    above = _signs(under)
    count = tl.sum(_num_bits(above))
    # The mean square of parts is 2**32. So the sum of eight out of 4096 is 2**23.5 at most, and that of their
    # distances less than 2**24: it is exact.
    distance = tl.abs(under[0])
    for i in tl.static_range(1, 8):
        distance += tl.abs(under[i])
    # Half of the distances, and of the differences, is what the parts above exceed the bound by.
    excess = (tl.sum(tl.sum(distance.to(tl.int32), axis=0)) + (total - TILE.rows * 32 * bound)) >> 1
    return above, (count, excess + count * bound)


@triton.jit
def _numbers(rounded, TILE: tl.constexpr):
    """Return the words of the three bits of each level's number, 0 to 7, which are found by halving."""
    b: tl.constexpr = TILE.bounds
    bound = tl.full(rounded.shape, b[3] + _ROUND, tl.float32)
    first = rounded > bound
    first_word = _signs(_eighths(bound - rounded))
    bound = tl.where(first, b[5] + _ROUND, b[1] + _ROUND)
    second = rounded > bound
    second_word = _signs(_eighths(bound - rounded))
    bound = _among(first, second, b[0] + _ROUND, b[2] + _ROUND, b[4] + _ROUND, b[6] + _ROUND)
    return first_word, second_word, _signs(_eighths(bound - rounded))


@triton.jit
def _total(rounded, TILE: tl.constexpr):
    """Return the sum of a block's parts, from their sums with `_ROUND`."""
    # What exceeds 32 bits is cut off on both sides.
    offset: tl.constexpr = (TILE.rows * 32 * _ROUND_BITS) % 2**32
    bits = tl.sum(rounded.to(tl.int32, bitcast=True), axis=0).to(tl.uint32, bitcast=True)
    return (tl.sum(bits) - offset).to(tl.int32, bitcast=True)


@triton.jit
def _difference(a, b):
    return a[0] - b[0], a[1] - b[1]


@triton.jit
def _add_level(product, norm, of_level, level):
    """Add a level's share to the sums of magnitudes times levels, and of squares of levels."""
    count, total = of_level
    return product + total.to(tl.float32) * level, norm + tl.cast(count, tl.float32) * (level * level)


@triton.jit
def coded(x, block, seed, size, TILE: tl.constexpr):
    """Return a word for each plane and row of a block of ``size`` values (row, column), and the scale.

    There are always four words. With fewer bits, the last ones have no meaning.
    """
    random = _random_words(block, seed, TILE)
    # Numbers without signs have the same order as integers, of which a warp finds the largest at once.
    largest = tl.max(tl.reduce(tl.abs(x), 0, _larger).to(tl.int32, bitcast=True))
    # The reference scales by a power of two, so that neither sums nor squares overflow or vanish. Where they
    # would not, the same power is applied to the sums: results are the same.
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    down = (exponent << 23).to(tl.float32, bitcast=True)
    if (largest < _LEAST_SAFE) | (largest >= _MOST_SAFE):
        # The same as ``up``. A division keeps this a branch: products alone would be computed for each block.
        x *= tl.div_rn(1.0, down)
        up = 1.0
    x = _flipped(x, random, block, TILE)
    square = _square(x, up * up * _SQUARE_UNITS, TILE.log_rows)
    # Roots and quotients have branches, beyond which the compiler moves nothing: what comes before them fills
    # the time in which the square is added up.
    z = _mixed(tl.trans(_mixed(x, TILE.log_rows, True)), 5, True)
    # The deviation of rotated values is the norm of the block.
    deviation = tl.sqrt_rn(square * (1 / _SQUARE_UNITS))
    unit = tl.where(deviation > 0, tl.div_rn(_UNITS, deviation) * up, 0.0)
    exists = tl.arange(0, TILE.rows)[None, :] * 32 < size
    rounded = tl.abs(z * tl.where(exists, unit, 0.0)) + _ROUND
    signs = tl.where(largest > 0, _signs(_eighths(z)), 0)
    total = _total(rounded, TILE)
    all_of = size, total
    if TILE.bits == 1:
        words = (signs, signs, signs, signs)
        product, norm = _add_level(0.0, 0.0, all_of, TILE.levels[0])
    elif TILE.bits == 2:
        above, of_above = _above(rounded, total, TILE.bounds[0], TILE)
        words = (signs, above, above, above)
        product, norm = _add_level(0.0, 0.0, _difference(all_of, of_above), TILE.levels[0])
        product, norm = _add_level(product, norm, of_above, TILE.levels[1])
    elif TILE.bits == 3:
        first, of_first = _above(rounded, total, TILE.bounds[0], TILE)
        second, of_second = _above(rounded, total, TILE.bounds[1], TILE)
        third, of_third = _above(rounded, total, TILE.bounds[2], TILE)
        words = (signs, second, first ^ second ^ third, third)
        product, norm = _add_level(0.0, 0.0, _difference(all_of, of_first), TILE.levels[0])
        product, norm = _add_level(product, norm, _difference(of_first, of_second), TILE.levels[1])
        product, norm = _add_level(product, norm, _difference(of_second, of_third), TILE.levels[2])
        product, norm = _add_level(product, norm, of_third, TILE.levels[3])
    else:
        first, second, third = _numbers(rounded, TILE)
        words = (signs, first, second, third)
        norm = tl.cast(size, tl.float32) * _MEAN_SQUARE_4  # that of normal values
        product = norm * _UNITS
    if TILE.unbiased:
        scale = tl.div_rn(deviation, product) * _UNITS
    else:
        scale = tl.div_rn(product, norm) * deviation * tl.div_rn(1 / _UNITS, tl.cast(size, tl.float32))
    scale = scale * down
    # A block that is too small for a scale becomes zeros.
    scale = tl.where((largest > 0) & (scale >= _MIN_SCALE), scale, 0.0)
    return words, tl.where(largest < INFINITY, scale, float("nan"))
