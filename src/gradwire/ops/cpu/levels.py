"""Round rotated blocks to levels and pack their codes, and decode them, in the first-level cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import LINE, load, spread, store, stream
from gradwire.ops.cpu.masks import (
    above,
    add_where,
    add_words,
    choose,
    load_mask,
    negated,
    signs_of,
    store_mask,
    sum_of_words,
)
from gradwire.ops.cpu.rotation import (
    GROUP,
    draw,
    flip_lines,
    load_lines,
    mix_between,
    mix_far,
    mix_middle,
    mix_near,
    mixed_down,
    mixed_up,
    scaled,
    store_lines,
)
from gradwire.ops.cpu.scalars import bits as bits_of
from gradwire.ops.cpu.scalars import clamped, magnitude
from gradwire.ops.formats import GAUSSIAN_LEVELS, INTEGER_BOUNDS

_LOW_2, _HIGH_2 = map(np.float32, GAUSSIAN_LEVELS[2])
_FIRST_3, _SECOND_3, _THIRD_3, _FOURTH_3 = map(np.float32, GAUSSIAN_LEVELS[3])
_LOW_SQUARE_2, _HIGH_SQUARE_2 = (np.float32(level * level) for level in GAUSSIAN_LEVELS[2])
_FIRST_SQUARE_3, _SECOND_SQUARE_3, _THIRD_SQUARE_3, _FOURTH_SQUARE_3 = (
    np.float32(level * level) for level in GAUSSIAN_LEVELS[3]
)
_ONE = np.float32(1)
_LARGEST = np.float32(np.finfo(np.float32).max)
# No value overflows if its scale is smaller: it is the scale times a sum of 4096 levels at most.
_LARGE = np.float32(_LARGEST / 2**14)
# The lowest bits of a number that is added to this one are an integer.
_ROUND, _ROUND_BITS = np.float32(2.0**23), 0x4B000000
_BOUND_2 = np.int32(INTEGER_BOUNDS[2][0] + _ROUND_BITS)
_INNER_3, _MIDDLE_3, _OUTER_3 = (np.int32(bound + _ROUND_BITS) for bound in INTEGER_BOUNDS[3])


class Target(NamedTuple):
    """Memory for decoded values, which are written past the caches, or times a factor added to a sum."""

    values: Any
    streams: Any
    is_sum: Any
    is_first: Any
    """True if the sum has no other term yet."""
    factor: Any


@helper
def _quantise_line(bits: Any, z: Any, unit: Any, codes: Any, byte: Any, plane: Any, sums: Any) -> Any:
    """Write the masks of one line, and return the sums with its share; a plane has ``plane`` bytes."""
    z = mixed_down(z)
    parts = bits_of(magnitude(z * unit) + _ROUND)
    one = spread(np.int32(1))
    total, total_1, count_1, total_2, count_2, total_3, count_3 = sums
    store_mask(codes, byte, signs_of(z))
    total = add_words(total, parts)
    if bits == 2:
        mask = above(parts, _BOUND_2)
        store_mask(codes, byte + plane, mask)
        total_1, count_1 = add_where(mask, total_1, parts), add_where(mask, count_1, one)
    elif bits == 3:
        inner, middle, outer = above(parts, _INNER_3), above(parts, _MIDDLE_3), above(parts, _OUTER_3)
        store_mask(codes, byte + plane, middle)
        store_mask(codes, byte + 2 * plane, inner ^ middle ^ outer)
        total_1, count_1 = add_where(inner, total_1, parts), add_where(inner, count_1, one)
        total_2, count_2 = add_where(middle, total_2, parts), add_where(middle, count_2, one)
        total_3, count_3 = add_where(outer, total_3, parts), add_where(outer, count_3, one)
    return total, total_1, count_1, total_2, count_2, total_3, count_3


@helper
def _sum_of(total: Any, count: Any) -> Any:
    """Return a sum of parts, of which ``count`` were added with the bits of the number they are added to."""
    return np.int64(np.int32((np.int64(total) - np.int64(count) * _ROUND_BITS) & 0xFFFFFFFF))


@helper
def _quantise(bits: Any, x: Any, size: Any, unit: Any, codes: Any) -> Any:
    """Mix what `rotate` left, pack the codes, and return the sums of parts times levels and of squares."""
    none = spread(np.int32(0))
    sums = none, none, none, none, none, none, none
    plane = size // 8
    for i in range(0, size, GROUP):
        v = load_lines(x, i, LINE)
        if size >= 1024:
            v = mix_far(v)
        if size >= 512:
            v = mix_middle(v)
        if size >= 256:
            v = mix_near(v)
        a, b, c, d, e, f, g, h = v
        byte = i // 8
        sums = _quantise_line(bits, a, unit, codes, byte, plane, sums)
        sums = _quantise_line(bits, b, unit, codes, byte + 2, plane, sums)
        sums = _quantise_line(bits, c, unit, codes, byte + 4, plane, sums)
        sums = _quantise_line(bits, d, unit, codes, byte + 6, plane, sums)
        sums = _quantise_line(bits, e, unit, codes, byte + 8, plane, sums)
        sums = _quantise_line(bits, f, unit, codes, byte + 10, plane, sums)
        sums = _quantise_line(bits, g, unit, codes, byte + 12, plane, sums)
        sums = _quantise_line(bits, h, unit, codes, byte + 14, plane, sums)
    return _products(bits, size, sums)


@helper
def _products(bits: Any, size: Any, sums: Any) -> Any:
    count_1, count_2, count_3 = sum_of_words(sums[2]), sum_of_words(sums[4]), sum_of_words(sums[6])
    total, total_1 = _sum_of(sum_of_words(sums[0]), size), _sum_of(sum_of_words(sums[1]), count_1)
    if bits == 1:
        return np.float32(total), np.float32(size)
    if bits == 2:
        product = np.float32(total - total_1) * _LOW_2 + np.float32(total_1) * _HIGH_2
        norm = np.float32(size - count_1) * _LOW_SQUARE_2 + np.float32(count_1) * _HIGH_SQUARE_2
        return product, norm
    total_2, total_3 = _sum_of(sum_of_words(sums[3]), count_2), _sum_of(sum_of_words(sums[5]), count_3)
    product = np.float32(total - total_1) * _FIRST_3 + np.float32(total_1 - total_2) * _SECOND_3
    product = product + np.float32(total_2 - total_3) * _THIRD_3 + np.float32(total_3) * _FOURTH_3
    norm = np.float32(size - count_1) * _FIRST_SQUARE_3 + np.float32(count_1 - count_2) * _SECOND_SQUARE_3
    norm = norm + np.float32(count_2 - count_3) * _THIRD_SQUARE_3 + np.float32(count_3) * _FOURTH_SQUARE_3
    return product, norm


@helper
def quantise(bits: Any, x: Any, size: Any, unit: Any, codes: Any) -> Any:
    """Mix what `rotate` left, pack the codes, and return the sums of parts times levels and of squares."""
    # The number of bits is a constant in each, so that the loops have no branches.
    if bits == 1:
        return _quantise(1, x, size, unit, codes)
    if bits == 2:
        return _quantise(2, x, size, unit, codes)
    return _quantise(3, x, size, unit, codes)


@helper
def _level(bits: Any, codes: Any, byte: Any, plane: Any) -> Any:
    """Return the line of levels of 16 codes, mixed."""
    level = spread(_ONE)
    if bits == 2:
        level = choose(load_mask(codes, byte + plane), _HIGH_2, _LOW_2)
    elif bits == 3:
        middle, odd = load_mask(codes, byte + plane), load_mask(codes, byte + 2 * plane)
        level = choose(middle, choose(odd, _FOURTH_3, _THIRD_3), choose(odd, _SECOND_3, _FIRST_3))
    return mixed_up(negated(load_mask(codes, byte), level))


@helper
def _dequantise(bits: Any, codes: Any, size: Any, x: Any) -> None:
    """Write the levels of packed codes to ``x``, mixed within groups of 128 values."""
    plane = size // 8
    for i in range(0, size, GROUP):
        byte = i // 8
        v = (
            _level(bits, codes, byte, plane), _level(bits, codes, byte + 2, plane),
            _level(bits, codes, byte + 4, plane), _level(bits, codes, byte + 6, plane),
            _level(bits, codes, byte + 8, plane), _level(bits, codes, byte + 10, plane),
            _level(bits, codes, byte + 12, plane), _level(bits, codes, byte + 14, plane),
        )  # fmt: skip
        if size >= 256:
            v = mix_near(v)
        if size >= 512:
            v = mix_middle(v)
        if size >= 1024:
            v = mix_far(v)
        store_lines(x, i, LINE, v)


@helper
def _emit(target: Any, i: Any, value: Any) -> None:
    if target.is_sum:
        value = value * target.factor
        if not target.is_first:
            value = load(target.values, i) + value
        store(target.values, i, value)
    elif target.streams:
        stream(target.values, i, value)
    else:
        store(target.values, i, value)


@helper
def decode_block(bits: Any, codes: Any, size: Any, scale: Any, signs: Any, x: Any, target: Any) -> None:
    """Write the values of packed codes to ``target``; ``x`` is memory for a block."""
    if bits == 1:
        _dequantise(1, codes, size, x)
    elif bits == 2:
        _dequantise(2, codes, size, x)
    else:
        _dequantise(3, codes, size, x)
    step = size // 8
    stride = GROUP
    while stride < step:
        mix_between(x, size, stride)
        stride *= 2
    draw(signs, size)
    for j in range(0, step, LINE):
        v = mix_far(mix_middle(mix_near(load_lines(x, j, step))))
        a, b, c, d, e, f, g, h = flip_lines(scaled(v, scale), signs, j, step)
        if scale > _LARGE:
            a, b, c, d = (
                clamped(a, _LARGEST), clamped(b, _LARGEST), clamped(c, _LARGEST), clamped(d, _LARGEST)
            )  # fmt: skip
            e, f, g, h = (
                clamped(e, _LARGEST), clamped(f, _LARGEST), clamped(g, _LARGEST), clamped(h, _LARGEST)
            )  # fmt: skip
        _emit(target, j, a)
        _emit(target, j + step, b)
        _emit(target, j + 2 * step, c)
        _emit(target, j + 3 * step, d)
        _emit(target, j + 4 * step, e)
        _emit(target, j + 5 * step, f)
        _emit(target, j + 6 * step, g)
        _emit(target, j + 7 * step, h)
