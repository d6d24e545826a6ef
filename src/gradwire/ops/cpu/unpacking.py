"""Tiles of codes to values, for each encoding with a scale per block.

The values ``y`` have room for seven more, which may be overwritten: the last byte of a short block needs no
case of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.scalars import bf16_to_f32, from_fp8, nibble, signed_byte, with_sign
from gradwire.ops.cpu.vectors import part
from gradwire.ops.formats import KINDS

INT8, INT4, SIGN, FP8 = (KINDS[kind] for kind in ("int8", "int4", "sign", "fp8"))

_FIRST, _FOURTH = np.int32(0), np.int32(4)


@helper
def _unpack_bytes(is_fp8: Any, codes: Any, size: Any, block: Any, halves: Any, y: Any) -> None:
    for b in range(halves.size):
        at, m, scale = b * block, min(block, size - b * block), bf16_to_f32(halves[b])
        packed, values = part(codes, at, m), part(y, at, m)
        if is_fp8:
            for i in range(m):
                values[i] = from_fp8(packed[i]) * scale
        else:
            for i in range(m):
                values[i] = signed_byte(packed[i]) * scale


@helper
def _unpack_nibbles(codes: Any, size: Any, block: Any, halves: Any, y: Any) -> None:
    for b in range(halves.size):
        at, scale = b * block, bf16_to_f32(halves[b])
        h = (min(block, size - at) + 1) // 2
        packed, firsts, seconds = part(codes, b * (block // 2), h), part(y, at, h), part(y, at + h, h)
        for j in range(h):
            firsts[j] = nibble(packed[j], _FIRST) * scale
            seconds[j] = nibble(packed[j], _FOURTH) * scale


@helper
def _unpack_signs(codes: Any, size: Any, block: Any, halves: Any, y: Any) -> None:
    for b in range(halves.size):
        at, scale = b * block, bf16_to_f32(halves[b])
        h = (min(block, size - at) + 7) // 8
        packed = part(codes, b * (block // 8), h)
        for k in range(8):
            plane = part(y, at + k * h, h)
            for j in range(h):
                plane[j] = with_sign(scale, packed[j], np.int32(k))


@helper
def unpack(kind: Any, codes: Any, size: Any, block: Any, halves: Any, y: Any) -> None:
    if kind == INT4:
        _unpack_nibbles(codes, size, block, halves, y)
    elif kind == SIGN:
        _unpack_signs(codes, size, block, halves, y)
    else:
        _unpack_bytes(kind == FP8, codes, size, block, halves, y)
