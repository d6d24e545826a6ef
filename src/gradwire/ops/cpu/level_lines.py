"""Round lines of rotated values to levels and pack their codes, and unpack them, in registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import spread
from gradwire.ops.cpu.masks import (
    above,
    add_where,
    add_words,
    choose,
    count_both,
    exceeds,
    load_mask,
    negated,
    signs_of,
    store_mask,
    sum_of_words,
)
from gradwire.ops.cpu.rotation import mixed_down, mixed_up
from gradwire.ops.cpu.scalars import bits as bits_of
from gradwire.ops.cpu.scalars import magnitude
from gradwire.ops.cpu.vectors import hidden
from gradwire.ops.formats import GAUSSIAN_LEVELS, INTEGER_BOUNDS, MEAN_SQUARE_4, PART

_LOW_2, _HIGH_2 = map(np.float32, GAUSSIAN_LEVELS[2])
_FIRST_3, _SECOND_3, _THIRD_3, _FOURTH_3 = map(np.float32, GAUSSIAN_LEVELS[3])
_LOW_SQUARE_2, _HIGH_SQUARE_2 = (np.float32(level * level) for level in GAUSSIAN_LEVELS[2])
_FIRST_SQUARE_3, _SECOND_SQUARE_3, _THIRD_SQUARE_3, _FOURTH_SQUARE_3 = (
    np.float32(level * level) for level in GAUSSIAN_LEVELS[3]
)
_ONE, _UNITS = np.float32(1), np.float32(1 / PART)
# The lowest bits of a number that is added to this one are an integer.
_ROUND, _ROUND_BITS = np.float32(2.0**23), 0x4B000000
_BOUND_2 = np.int32(INTEGER_BOUNDS[2][0] + _ROUND_BITS)
_INNER_3, _MIDDLE_3, _OUTER_3 = (np.int32(bound + _ROUND_BITS) for bound in INTEGER_BOUNDS[3])
_LEVELS_4 = tuple(map(np.float32, GAUSSIAN_LEVELS[4]))
_MEAN_SQUARE_4 = np.float32(MEAN_SQUARE_4)
_BOUNDS_4 = tuple(_ROUND + np.float32(bound) for bound in INTEGER_BOUNDS[4])


@helper
def _among(mask_1: Any, mask_2: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return a line of the numbers to which two bits lead: 00 to ``a``, 01 to ``b`` and so on."""
    return choose(mask_1, choose(mask_2, d, c), choose(mask_2, b, a))


@helper
def _store_number(rounded: Any, codes: Any, byte: Any, plane: Any) -> None:
    """Write the bits of each level's number, 0 to 7, which are found by halving."""
    b = _BOUNDS_4
    first = exceeds(rounded, spread(b[3]))
    second = exceeds(rounded, choose(first, b[5], b[1]))
    third = exceeds(rounded, _among(first, second, b[0], b[2], b[4], b[6]))
    store_mask(codes, byte + plane, first)
    store_mask(codes, byte + 2 * plane, second)
    store_mask(codes, byte + 3 * plane, third)


@helper
def code_line(bits: Any, z: Any, unit: Any, codes: Any, byte: Any, plane: Any, sums: Any) -> Any:
    """Write the masks of one line, and return the sums with its share; a plane has ``plane`` bytes."""
    z = mixed_down(z)
    rounded = magnitude(z * unit) + _ROUND
    store_mask(codes, byte, signs_of(z))
    if bits == 4:
        _store_number(rounded, codes, byte, plane)
        return sums
    parts = bits_of(rounded)
    total, total_1, total_2, total_3 = sums
    total = add_words(total, parts)
    if bits == 2:
        mask = above(parts, _BOUND_2)
        store_mask(codes, byte + plane, mask)
        total_1 = add_where(mask, total_1, parts)
    elif bits == 3:
        inner, middle, outer = above(parts, _INNER_3), above(parts, _MIDDLE_3), above(parts, _OUTER_3)
        store_mask(codes, byte + plane, middle)
        store_mask(codes, byte + 2 * plane, inner ^ middle ^ outer)
        total_1, total_2 = add_where(inner, total_1, parts), add_where(middle, total_2, parts)
        total_3 = add_where(outer, total_3, parts)
    return total, total_1, total_2, total_3


@helper
def _sum_of(total: Any, count: Any) -> Any:
    """Return a sum of parts, of which ``count`` were added with the bits of the number they are added to."""
    return np.int64(np.int32((np.int64(sum_of_words(total)) - count * _ROUND_BITS) & 0xFFFFFFFF))


@helper
def _count(codes: Any, plane: Any, other: Any, num_bytes: Any) -> Any:
    """Return the number of bits that are set in both of two planes."""
    count = 0
    for j in range(0, hidden(num_bytes), 8):
        count += count_both(codes, plane * num_bytes + j, other * num_bytes + j)
    return count


@helper
def products(bits: Any, size: Any, codes: Any, sums: Any) -> Any:
    """Return the sums of parts times levels and of squares of levels, from those of `code_line`."""
    if bits == 4:  # those of normal values
        norm = np.float32(size) * _MEAN_SQUARE_4
        return norm * _UNITS, norm
    total, plane = _sum_of(sums[0], size), size // 8
    if bits == 1:
        return np.float32(total), np.float32(size)
    if bits == 2:
        count_1 = _count(codes, 1, 1, plane)
        total_1 = _sum_of(sums[1], count_1)
        product = np.float32(total - total_1) * _LOW_2 + np.float32(total_1) * _HIGH_2
        norm = np.float32(size - count_1) * _LOW_SQUARE_2 + np.float32(count_1) * _HIGH_SQUARE_2
        return product, norm
    # The last plane has the values beyond the outer bound, and those between the inner and the middle one.
    count_2, count_3 = _count(codes, 1, 1, plane), _count(codes, 1, 2, plane)
    count_1 = count_2 + _count(codes, 2, 2, plane) - count_3
    total_1, total_2, total_3 = (
        _sum_of(sums[1], count_1),
        _sum_of(sums[2], count_2),
        _sum_of(sums[3], count_3),
    )
    product = np.float32(total - total_1) * _FIRST_3 + np.float32(total_1 - total_2) * _SECOND_3
    product = product + np.float32(total_2 - total_3) * _THIRD_3 + np.float32(total_3) * _FOURTH_3
    norm = np.float32(size - count_1) * _FIRST_SQUARE_3 + np.float32(count_1 - count_2) * _SECOND_SQUARE_3
    norm = norm + np.float32(count_2 - count_3) * _THIRD_SQUARE_3 + np.float32(count_3) * _FOURTH_SQUARE_3
    return product, norm


@helper
def level_line(bits: Any, codes: Any, byte: Any, plane: Any) -> Any:
    """Return the line of levels of 16 codes, mixed."""
    level = spread(_ONE)
    if bits == 2:
        level = choose(load_mask(codes, byte + plane), _HIGH_2, _LOW_2)
    elif bits == 3:
        middle, odd = load_mask(codes, byte + plane), load_mask(codes, byte + 2 * plane)
        level = choose(middle, choose(odd, _FOURTH_3, _THIRD_3), choose(odd, _SECOND_3, _FIRST_3))
    elif bits == 4:
        first, second = load_mask(codes, byte + plane), load_mask(codes, byte + 2 * plane)
        third, x = load_mask(codes, byte + 3 * plane), _LEVELS_4
        odd, even = (
            _among(first, second, x[1], x[3], x[5], x[7]),
            _among(first, second, x[0], x[2], x[4], x[6]),
        )
        level = choose(third, odd, even)
    return mixed_up(negated(load_mask(codes, byte), level))
