"""Encode one rotated block: its codes and its scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.ops.cpu.compiling import helper, subroutine
from gradwire.ops.cpu.levels import quantise
from gradwire.ops.cpu.lines import LINE, largest_of, load, spread, store
from gradwire.ops.cpu.rotation import rotate, sum_of_squares
from gradwire.ops.cpu.scalars import INFINITY, from_bits, larger
from gradwire.ops.formats import LEAST_SAFE, MIN_SCALE, MOST_SAFE, PART

_INFINITY = np.int32(INFINITY)
_ZERO, _ONE = np.float32(0), np.float32(1)
_NAN = np.float32(np.nan)
_MIN_SCALE = np.float32(MIN_SCALE)
_UNIT, _UNITS = np.float32(PART), np.float32(1 / PART)
_LEAST_SAFE, _MOST_SAFE = np.int32(LEAST_SAFE), np.int32(MOST_SAFE)


@helper
def _encode_rotated(
    form: Any, x: Any, ahead: Any, size: Any, factor: Any, largest: Any, squares: Any, codes: Any
) -> Any:
    """Encode what `rotate` has left, times ``factor``, and return the scale of a block."""
    deviation = np.sqrt(sum_of_squares(squares, factor))
    unit = _UNITS / deviation if deviation > 0 else _ZERO
    product, norm = quantise(form.bits, x, size, unit * factor, codes, ahead)
    if form.unbiased:
        scale = deviation / product * _UNITS
    else:
        scale = product / norm * deviation * (_UNIT / np.float32(size))
    scale *= from_bits(np.int32(_exponent(largest) << 23))
    if scale < _MIN_SCALE:  # too small for a scale: the block becomes zeros
        scale = _ZERO
    if largest == 0:  # a block of zeros has no signs
        scale = _ZERO
        for j in range(size // 8):
            codes[j] = 0
    return scale if largest < _INFINITY else _NAN


@helper
def _exponent(largest: Any) -> Any:
    """Return the exponent of the block's largest magnitude, with its bias, such that its inverse exists."""
    return min(max(largest >> 23, 1), 253)


@helper
def _up(largest: Any) -> Any:
    """Return the power of two that makes the largest magnitude about 1."""
    return from_bits(np.int32((254 - _exponent(largest)) << 23))


@subroutine
def _encode_any(
    form: Any, source: Any, ahead: Any, size: Any, signs: Any, x: Any, squares: Any, codes: Any
) -> Any:
    """Encode a block of any size and magnitude, padded in ``source``; return its scale."""
    bits_of_largest = spread(np.int32(0))
    for i in range(0, size, LINE):
        bits_of_largest = larger(bits_of_largest, load(source, i))
    largest = largest_of(bits_of_largest)
    # Times a power of two, so that neither sums nor squares overflow or vanish.
    up = _up(largest)
    for i in range(0, size, LINE):
        store(x, i, load(source, i) * up)
    rotate(x, ahead, signs, x, size, squares)
    return _encode_rotated(form, x, ahead, size, _ONE, largest, squares, codes)


@helper
def encode_block(
    form: Any, source: Any, ahead: Any, size: Any, signs: Any, x: Any, squares: Any, codes: Any
) -> Any:
    """Encode a block, padded in ``source`` to ``size`` values, and return its scale; ``x`` is overwritten."""
    if size == 1024:  # the default: as a constant, it saves most of the arithmetic on addresses
        largest = rotate(source, ahead, signs, x, 1024, squares)
        if _LEAST_SAFE <= largest < _MOST_SAFE:
            return _encode_rotated(form, x, ahead, 1024, _up(largest), largest, squares, codes)
    return _encode_any(form, source, ahead, size, signs, x, squares, codes)
