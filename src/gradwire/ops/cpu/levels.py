"""Round rotated blocks to levels and pack their codes, and decode them, in the first-level cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradwire.ops.cpu.compiling import helper, subroutine
from gradwire.ops.cpu.lines import LINE, load, spread, store, stream
from gradwire.ops.cpu.masks import (
    above,
    add_where,
    add_words,
    choose,
    count_both,
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
    prefetch_part,
    scaled,
    store_lines,
)
from gradwire.ops.cpu.scalars import bits as bits_of
from gradwire.ops.cpu.scalars import clamped, magnitude
from gradwire.ops.cpu.vectors import hidden
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
    total, total_1, total_2, total_3 = sums
    store_mask(codes, byte, signs_of(z))
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
def _quantise(bits: Any, x: Any, size: Any, unit: Any, codes: Any, ahead: Any) -> Any:
    """Mix what `rotate` left, pack the codes, and return the sums of parts times levels and of squares."""
    none = spread(np.int32(0))
    sums = none, none, none, none
    plane = size // 8
    for i in range(0, hidden(size), GROUP):
        prefetch_part(ahead, size // 2 + i // 2)
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
    return _products(bits, size, codes, sums)


@helper
def _count(codes: Any, plane: Any, other: Any, num_bytes: Any) -> Any:
    """Return the number of bits that are set in both of two planes."""
    count = 0
    for j in range(0, hidden(num_bytes), 8):
        count += count_both(codes, plane * num_bytes + j, other * num_bytes + j)
    return count


@helper
def _products(bits: Any, size: Any, codes: Any, sums: Any) -> Any:
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
def quantise(bits: Any, x: Any, size: Any, unit: Any, codes: Any, ahead: Any) -> Any:
    """Mix what `rotate` left, pack the codes, and return the sums of parts times levels and of squares."""
    # The number of bits is a constant in each, so that the loops have no branches.
    if bits == 1:
        return _quantise(1, x, size, unit, codes, ahead)
    if bits == 2:
        return _quantise(2, x, size, unit, codes, ahead)
    return _quantise(3, x, size, unit, codes, ahead)


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
def _unpack_group(bits: Any, codes: Any, size: Any, i: Any, x: Any) -> None:
    """Write the levels of 128 codes to ``x``, mixed among themselves."""
    plane, byte = size // 8, i // 8
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
def _finish_group(size: Any, scale: Any, signs: Any, x: Any, j: Any, target: Any) -> None:
    """Mix values that are an eighth of the block apart, and write eight lines of them to ``target``."""
    step = size // 8
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


@helper
def _unpack(bits: Any, codes: Any, size: Any, x: Any) -> None:
    for i in range(0, hidden(size), GROUP):
        _unpack_group(bits, codes, size, i, x)


@subroutine
def unpack(bits: Any, codes: Any, size: Any, x: Any) -> None:
    """Write the levels of packed codes to ``x``, mixed except for what `finish` does."""
    if bits == 1:
        _unpack(1, codes, size, x)
    elif bits == 2:
        _unpack(2, codes, size, x)
    else:
        _unpack(3, codes, size, x)
    stride = GROUP
    while stride < size // 8:
        mix_between(x, size, stride)
        stride *= 2


@subroutine
def finish(size: Any, scale: Any, signs: Any, x: Any, target: Any) -> None:
    """Write the values of a block to ``target``, from what `unpack` has left in ``x``."""
    draw(signs, size)
    for j in range(0, size // 8, LINE):
        _finish_group(size, scale, signs, x, j, target)


@helper
def _finish_and_unpack(
    bits: Any, scale: Any, signs: Any, x: Any, target: Any, codes: Any, next_x: Any
) -> None:
    draw(signs, 1024)
    for j in range(0, hidden(128), LINE):
        _finish_group(1024, scale, signs, x, j, target)
        _unpack_group(bits, codes, 1024, 8 * j, next_x)


@helper
def finish_and_unpack(
    bits: Any, scale: Any, signs: Any, x: Any, target: Any, codes: Any, next_x: Any
) -> None:
    """Call `finish` for a block of 1024 values and `unpack` for the next one.

    They take turns, since writing to memory takes as long as both: alone, `finish` would wait for memory.
    """
    if bits == 1:
        _finish_and_unpack(1, scale, signs, x, target, codes, next_x)
    elif bits == 2:
        _finish_and_unpack(2, scale, signs, x, target, codes, next_x)
    else:
        _finish_and_unpack(3, scale, signs, x, target, codes, next_x)
