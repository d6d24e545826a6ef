"""Decode a block's codes, for each encoding with a scale per block.

Whole lines are read and written, so there must be room for one more line behind the codes and the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import LINE, load, store, stream
from gradwire.ops.cpu.scalars import from_fp8, nibble, signed_byte, with_sign
from gradwire.ops.formats import KINDS

INT8, INT4, SIGN, FP8 = (KINDS[kind] for kind in ("int8", "int4", "sign", "fp8"))


@helper
def _emit(value: Any, factor: Any, total: Any, values: Any, i: Any, is_first: Any, streams: Any) -> None:
    value = value * factor
    if not is_first:
        value = load(total, i) + value
    if streams:
        stream(values, i, value)
    else:
        store(values, i, value)


@helper
def add_unpacked(
    kind: Any,
    codes: Any,
    num_bytes: Any,
    scale: Any,
    factor: Any,
    total: Any,
    values: Any,
    is_first: Any,
    streams: Any,
) -> None:
    """Write the decoded values times a factor, plus ``total`` if they are not the first term, to ``values``.

    A plane must fill its lines. With memory for the values in between, `int8` takes one to two times as long,
    from process to process.
    """
    if kind == INT8:
        for i in range(0, num_bytes, LINE):
            y = signed_byte(load(codes, i)) * scale
            _emit(y, factor, total, values, i, is_first, streams)
    elif kind == FP8:
        for i in range(0, num_bytes, LINE):
            _emit(from_fp8(load(codes, i)) * scale, factor, total, values, i, is_first, streams)
    elif kind == INT4:
        for k in range(2):
            for j in range(0, num_bytes, LINE):
                y = nibble(load(codes, j), np.int32(4 * k)) * scale
                _emit(y, factor, total, values, k * num_bytes + j, is_first, streams)
    else:
        for k in range(8):
            for j in range(0, num_bytes, LINE):
                y = with_sign(scale, load(codes, j), np.int32(k))
                _emit(y, factor, total, values, k * num_bytes + j, is_first, streams)


@helper
def unpack(kind: Any, codes: Any, num_bytes: Any, scale: Any, values: Any) -> None:
    """Write the values plane by plane; each plane overwrites the end of the last line of the one before."""
    if kind == INT8:
        for i in range(0, num_bytes, LINE):
            store(values, i, signed_byte(load(codes, i)) * scale)
    elif kind == FP8:
        for i in range(0, num_bytes, LINE):
            store(values, i, from_fp8(load(codes, i)) * scale)
    elif kind == INT4:
        for k in range(2):
            for j in range(0, num_bytes, LINE):
                store(values, k * num_bytes + j, nibble(load(codes, j), np.int32(4 * k)) * scale)
    else:
        for k in range(8):
            for j in range(0, num_bytes, LINE):
                store(values, k * num_bytes + j, with_sign(scale, load(codes, j), np.int32(k)))
