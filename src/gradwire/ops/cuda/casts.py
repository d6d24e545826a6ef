"""Sums of whole values in Triton, for values in CUDA memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops.operands import Scale, Terms

_BLOCK = 1024


@triton.jit(do_not_specialize=["numel", "num_rows", "own_index"])
def _reduce(
    own, rows, encoded, numel, num_rows, stride, own_index, factor, up, down, factors,
    HAS_FACTORS: tl.constexpr, IS_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = offsets < numel
    mine = tl.load(own + offsets, exists, other=0.0).to(tl.float32)
    x = tl.full(mine.shape, -0.0, tl.float32)  # added to a zero, -0.0 keeps the zero's sign
    row = rows + offsets
    for r in range(num_rows):
        if HAS_FACTORS:
            factor = tl.load(factors + r)
        value = mine
        if r != own_index:
            value = tl.load(row, exists, other=0.0).to(tl.float32)
        x += value * factor
        # Advanced row by row: the product r * stride may overflow 32 bits.
        row += stride
    if not IS_SUM:
        if HAS_FACTORS:
            up = tl.load(factors + num_rows)
            down = tl.load(factors + num_rows + 1)
        code = (x * up).to(encoded.dtype.element_ty)
        tl.store(encoded + offsets, code, exists)
        x = code.to(tl.float32) * down
    tl.store(own + offsets, x.to(own.dtype.element_ty), exists)


def reduce_rows(terms: Terms, encoded: Tensor, up: Scale, down: Scale) -> None:
    if encoded.data_ptr() == terms.own.data_ptr():  # values that travel as they are summed
        sum_rows(terms, encoded.dtype)
    else:
        _launch(terms, encoded, up, down, is_sum=False)


def sum_rows(terms: Terms, dtype: torch.dtype) -> None:
    # The second operand says what rows hold, and is not written.
    _launch(terms, terms.rows.view(dtype), 1.0, 1.0, is_sum=True)


def _launch(terms: Terms, encoded: Tensor, up: Scale, down: Scale, *, is_sum: bool) -> None:
    own = terms.own
    rows = terms.rows.view(encoded.dtype)[:, terms.header_bytes // encoded.dtype.itemsize :]
    _reduce[(triton.cdiv(own.numel(), _BLOCK),)](
        own=own,
        rows=rows,
        encoded=encoded,
        numel=own.numel(),
        num_rows=len(rows),
        stride=rows.stride(0),
        own_index=terms.own_index,
        **_factors(terms.scales, up, down, own),
        IS_SUM=is_sum,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,  # each product is rounded before it is added
    )


def _factors(scales: Sequence[Scale], up: Scale, down: Scale, own: Tensor) -> dict[str, Any]:
    """Return the factors of the terms, and those of the sum: as numbers if all terms have the same.

    They are a tensor if one of them is, since its value is not known here.
    """
    each = [*scales, up, down]
    if not any(isinstance(scale, Tensor) for scale in each) and len({*scales}) == 1:
        return {"factor": scales[0], "up": up, "down": down, "factors": own, "HAS_FACTORS": False}
    factors = [
        scale.to(torch.float32) if isinstance(scale, Tensor) else own.new_full((), scale, dtype=torch.float32)
        for scale in each
    ]
    return {"factor": 1.0, "up": 1.0, "down": 1.0, "factors": torch.stack(factors), "HAS_FACTORS": True}
