"""A block's codes to values, for each encoding with a scale per block.

Whole lines are read and written: behind the codes, and behind the values ``y``, is room for one more.
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
def unpack(kind: Any, codes: Any, num_bytes: Any, scale: Any, y: Any) -> None:
    """Values of as many planes as a byte holds codes; each plane's last line gives way to the next plane."""
    if kind == INT8:
        for i in range(0, num_bytes, LINE):
            store(y, i, signed_byte(load(codes, i)) * scale)
    elif kind == FP8:
        for i in range(0, num_bytes, LINE):
            store(y, i, from_fp8(load(codes, i)) * scale)
    elif kind == INT4:
        for k in range(2):
            for j in range(0, num_bytes, LINE):
                store(y, k * num_bytes + j, nibble(load(codes, j), np.int32(4 * k)) * scale)
    else:
        for k in range(8):
            for j in range(0, num_bytes, LINE):
                store(y, k * num_bytes + j, with_sign(scale, load(codes, j), np.int32(k)))
