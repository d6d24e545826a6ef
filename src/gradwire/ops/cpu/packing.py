"""Encode a block's values, for each encoding with a scale per block.

A block is worked on in whole lines. Where its bytes do not make whole lines, at least 31 zeros follow its
values, and there is as much room behind each result. Where planes overlap, a result is written twice, with
the same value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import LINE, counting, largest_of, load, spread, store, sum_by_halves
from gradwire.ops.cpu.scalars import (
    INFINITY,
    add_sign,
    bf16_to_f32,
    bits,
    centred,
    clamped,
    f32_to_bf16,
    from_bits,
    from_fp8,
    larger,
    low_byte,
    magnitude,
    pack_pair,
    random_bits,
    to_fp8,
    with_sign_of,
)
from gradwire.ops.cpu.unpacking import FP8, INT4, SIGN
from gradwire.ops.cpu.vectors import prefetch
from gradwire.ops.formats import MIN_SCALE

_INFINITY = np.int32(INFINITY)
_LARGEST_BF16 = np.int32(0x7F7F0000)
_ZERO, _ONE = np.float32(0), np.float32(1)
_NAN = np.float32(np.nan)
_MIN_SCALE = np.float32(MIN_SCALE)
# Added to a number below 2^22, it leaves the nearest integer, ties to even, in the lowest bits.
_ROUND = np.float32(1.5 * 2**23)


class Source(NamedTuple):
    """A block's values, and what to prefetch while they are read twice: for a scale, then for codes."""

    values: Any
    m: Any
    """Number of values."""
    next_values: Any
    next_residual: Any


class Destination(NamedTuple):
    """Pointers to what is written for a block."""

    codes: Any
    only_codes: Any
    """True if the two below are not needed."""
    decoded: Any
    """Receives what the codes decode to."""
    left_out: Any
    """Receives what the codes leave out, times ``factor``."""
    factor: Any


class Noise(NamedTuple):
    """Noise of stochastic rounding: the index of the block's first value, and the words of a seed."""

    start: Any
    low: Any
    high: Any


class Partials(NamedTuple):
    """Memory for the partial sums of a mean."""

    values: Any
    size: Any


@helper
def _largest(source: Any) -> Any:
    """Return the bits of the largest magnitude; at least those of infinity if a value is not finite."""
    largest = spread(np.int32(0))
    for i in range(0, source.m, LINE):
        prefetch(source.next_values, i)
        largest = larger(largest, load(source.values, i))
    return largest_of(largest)


@helper
def _scale_of(source: Any, limit: Any) -> Any:
    """Return the scale that gives the largest magnitude the code ``limit``; NaN if a value is not finite."""
    largest = _largest(source)
    # Rounded up to bf16, so that no code exceeds the limit.
    up = (bits(from_bits(largest) / limit) + np.int32(0xFFFF)) & np.int32(-0x10000)
    scale = max(from_bits(np.int32(up)), _MIN_SCALE)
    scale = scale if largest > 0 else _ZERO
    return scale if largest < _INFINITY else _NAN


@helper
def _mean_of(source: Any, partials: Any) -> Any:
    """Return the mean magnitude of a block, in bf16; NaN if a value is not finite.

    Added up in an order that suits vector instructions: by planes, then by halves.
    """
    h = (source.m + 7) // 8
    share = _ONE / np.float32(source.m)
    for j in range(0, h, LINE):
        total = spread(_ZERO)
        for k in range(8):
            prefetch(source.next_values, k * h + j)
            total = total + magnitude(load(source.values, k * h + j)) * share
        store(partials.values, j, total)
    for j in range(h, partials.size):
        partials.values[j] = _ZERO
    width = partials.size
    while width > LINE:
        width >>= 1
        for j in range(0, width, LINE):
            store(partials.values, j, load(partials.values, j) + load(partials.values, width + j))
    mean = bf16_to_f32(f32_to_bf16(sum_by_halves(load(partials.values, 0))))
    if bits(mean) >= _INFINITY:  # too large for bf16, or a value is not finite
        mean = from_bits(_LARGEST_BF16) if _largest(source) < _INFINITY else _NAN
    return mean


@helper
def _store_decoded(out: Any, i: Any, values: Any, decoded: Any) -> None:
    store(out.decoded, i, decoded)
    store(out.left_out, i, (values - decoded) * out.factor)


@helper
def _draw(noise: Any, i: Any) -> Any:
    """Return 24 random bits for each value of the line that begins at ``i``."""
    return random_bits(counting(noise.start + i), noise.low, noise.high)


@helper
def _rounded(form: Any, values: Any, inverse: Any, noise: Any, i: Any) -> Any:
    """Return the nearest integers, in the lowest bits; noise of a step's width makes the choice random."""
    y = values * inverse
    if form.stochastic:
        y = clamped(y + centred(_draw(noise, i)), form.limit)
    return y + _ROUND


@helper
def _pack_bytes(form: Any, source: Any, scale: Any, out: Any, noise: Any) -> None:
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    for i in range(0, source.m, LINE):
        prefetch(source.next_residual, i)
        values = load(source.values, i)
        rounded = _rounded(form, values, inverse, noise, i)
        store(out.codes, i, low_byte(bits(rounded)))
        if not out.only_codes:
            _store_decoded(out, i, values, (rounded - _ROUND) * scale)


@helper
def _pack_nibbles(form: Any, source: Any, scale: Any, out: Any, noise: Any) -> None:
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    h = (source.m + 1) // 2
    for j in range(0, h, LINE):
        prefetch(source.next_residual, j)
        prefetch(source.next_residual, h + j)
        first, second = load(source.values, j), load(source.values, h + j)
        rounded = _rounded(form, first, inverse, noise, j)
        rounded_second = _rounded(form, second, inverse, noise, h + j)
        store(out.codes, j, pack_pair(bits(rounded), bits(rounded_second)))
        if not out.only_codes:
            _store_decoded(out, j, first, (rounded - _ROUND) * scale)
            _store_decoded(out, h + j, second, (rounded_second - _ROUND) * scale)


@helper
def _pack_fp8(form: Any, source: Any, scale: Any, out: Any, noise: Any) -> None:
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    for i in range(0, source.m, LINE):
        prefetch(source.next_residual, i)
        values = load(source.values, i)
        if form.stochastic:
            code = to_fp8(values * inverse, _draw(noise, i), True)
        else:
            code = to_fp8(values * inverse, np.int32(0), False)
        store(out.codes, i, code)
        if not out.only_codes:
            _store_decoded(out, i, values, from_fp8(code) * scale)


@helper
def _pack_signs(source: Any, scale: Any, out: Any) -> None:
    mask = np.int32(-1) if scale > _ZERO else np.int32(0)
    h = (source.m + 7) // 8
    for j in range(0, h, LINE):
        byte = spread(np.int32(0))
        for k in range(8):
            prefetch(source.next_residual, k * h + j)
            values = load(source.values, k * h + j)
            decoded = with_sign_of(scale, values, mask)
            byte = add_sign(byte, decoded, np.int32(k))
            if not out.only_codes:
                _store_decoded(out, k * h + j, values, decoded)
        store(out.codes, j, low_byte(byte))


@helper
def pack(form: Any, source: Any, out: Any, noise: Any, partials: Any) -> Any:
    """Encode a block and return its scale.

    If the scale is NaN, so is every decoded value, and what was left out stays as it was.
    """
    scale = _mean_of(source, partials) if form.kind == SIGN else _scale_of(source, form.limit)
    if not scale >= _ZERO:
        for i in range(source.m):
            out.decoded[i] = _NAN
    elif form.kind == SIGN:
        _pack_signs(source, scale, out)
    elif form.kind == INT4:
        _pack_nibbles(form, source, scale, out, noise)
    elif form.kind == FP8:
        _pack_fp8(form, source, scale, out, noise)
    else:
        _pack_bytes(form, source, scale, out, noise)
    return scale
