"""Decode a block's codes, for each encoding with a scale per block.

Whole lines are read and written, so there must be room for one more line behind the codes and the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import LINE, load, store
from gradwire.ops.cpu.scalars import from_fp8, nibble, signed_byte, with_sign
from gradwire.ops.formats import KINDS

INT8, INT4, SIGN, FP8 = (KINDS[kind] for kind in ("int8", "int4", "sign", "fp8"))


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
