"""Round rotated blocks to levels and pack their codes, and decode them, in the first-level cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradwire.ops.cpu.compiling import helper, subroutine
from gradwire.ops.cpu.level_lines import code_line, level_line, products
from gradwire.ops.cpu.lines import LINE, load, spread, store, stream
from gradwire.ops.cpu.rotation import (
    GROUP,
    draw,
    flip_lines,
    load_lines,
    mix_between,
    mix_far,
    mix_middle,
    mix_near,
    prefetch_part,
    scaled,
    store_lines,
)
from gradwire.ops.cpu.scalars import clamped
from gradwire.ops.cpu.vectors import hidden

_LARGEST = np.float32(np.finfo(np.float32).max)
# No value overflows if its scale is smaller: it is the scale times a sum of 4096 levels at most.
_LARGE = np.float32(_LARGEST / 2**14)


class Target(NamedTuple):
    """Memory for decoded values, or for their sum with other terms."""

    values: Any
    streams: Any
    """True to write past the caches."""
    is_sum: Any
    """True to write the values times the factor, added to ``total``."""
    is_first: Any
    """True if the sum has no other term yet."""
    factor: Any
    total: Any


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
        sums = code_line(bits, a, unit, codes, byte, plane, sums)
        sums = code_line(bits, b, unit, codes, byte + 2, plane, sums)
        sums = code_line(bits, c, unit, codes, byte + 4, plane, sums)
        sums = code_line(bits, d, unit, codes, byte + 6, plane, sums)
        sums = code_line(bits, e, unit, codes, byte + 8, plane, sums)
        sums = code_line(bits, f, unit, codes, byte + 10, plane, sums)
        sums = code_line(bits, g, unit, codes, byte + 12, plane, sums)
        sums = code_line(bits, h, unit, codes, byte + 14, plane, sums)
    return products(bits, size, codes, sums)


@helper
def quantise(bits: Any, x: Any, size: Any, unit: Any, codes: Any, ahead: Any) -> Any:
    """Mix what `rotate` left, pack the codes, and return the sums of parts times levels and of squares."""
    # The number of bits is a constant in each, so that the loops have no branches.
    if bits == 1:
        return _quantise(1, x, size, unit, codes, ahead)
    if bits == 2:
        return _quantise(2, x, size, unit, codes, ahead)
    if bits == 3:
        return _quantise(3, x, size, unit, codes, ahead)
    return _quantise(4, x, size, unit, codes, ahead)


@helper
def _unpack_group(bits: Any, codes: Any, size: Any, i: Any, x: Any) -> None:
    """Write the levels of 128 codes to ``x``, mixed among themselves."""
    plane, byte = size // 8, i // 8
    v = (
        level_line(bits, codes, byte, plane), level_line(bits, codes, byte + 2, plane),
        level_line(bits, codes, byte + 4, plane), level_line(bits, codes, byte + 6, plane),
        level_line(bits, codes, byte + 8, plane), level_line(bits, codes, byte + 10, plane),
        level_line(bits, codes, byte + 12, plane), level_line(bits, codes, byte + 14, plane),
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
            value = load(target.total, i) + value
    if target.streams:
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
    elif bits == 3:
        _unpack(3, codes, size, x)
    else:
        _unpack(4, codes, size, x)
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
    elif bits == 3:
        _finish_and_unpack(3, scale, signs, x, target, codes, next_x)
    else:
        _finish_and_unpack(4, scale, signs, x, target, codes, next_x)
