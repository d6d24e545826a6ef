"""Encodings with a scale per block in numba, for fp32 values in host memory.

Block by block, so that main memory is read and written once: what is summed stays in the first-level cache
until it is packed, and what comes next is fetched meanwhile. Importing this module compiles the kernels, or
reads them from numba's cache on disk.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gradwire.ops.cpu.compiling import helper, kernel
from gradwire.ops.cpu.lines import F4, I4, I8, LINE, U1, U2, load, point, store
from gradwire.ops.cpu.packing import pack
from gradwire.ops.cpu.scalars import bf16_to_f32, f32_to_bf16
from gradwire.ops.cpu.unpacking import unpack
from gradwire.ops.cpu.vectors import copy, fence, span, streams_to, write
from gradwire.ops.formats import KINDS, LIMITS, BlockFormat, Seed

# Values that are fetched ahead of those worked on: 4 KiB.
_AHEAD = 1024
# What a block in scratch memory has room for behind it: lines of its last plane may end there.
_SPARE = 2 * LINE


@helper
def _widen(halves: Any, singles: Any, m: Any) -> None:
    for i in range(m):
        singles[i] = bf16_to_f32(halves[i])


@helper
def _narrow(singles: Any, halves: Any, m: Any) -> None:
    for i in range(m):
        halves[i] = f32_to_bf16(singles[i])


@helper
def _whole(codes: Any, num_bytes: Any, spare: Any, fits: Any) -> Any:
    """The codes, where whole lines can be read."""
    if not fits:
        copy(codes, spare, num_bytes)
    return codes if fits else point(spare, 0)


@helper
def _add(values: Any, residual: Any, keeps: Any, factor: Any, m: Any, total: Any, first: Any) -> None:
    for i in range(0, m, LINE):
        term = load(values, i)
        if keeps:
            term = term + load(residual, i)
        term = term * factor
        if not first:
            term = load(total, i) + term
        store(total, i, term)


@kernel(
    (
        *(I8, I8, I8, F4, numba.boolean),
        *(U1[::1], U2[::1], I8, I8, I8, F4[::1], I8, F4, F4),
        *(F4[::1], U2[::1], numba.boolean, U1[::1], U2[::1], I4, I4),
        *(F4[::1], U1[::1]),
    )
)
def _reduce(
    kind: Any,
    block: Any,
    shift: Any,
    limit: Any,
    dithered: Any,
    rows: Any,
    row_halves: Any,
    num_rows: Any,
    stride: Any,
    first_scale: Any,
    own: Any,
    own_index: Any,
    factor: Any,
    inverse: Any,
    residual: Any,
    residual_halves: Any,
    writes_own: Any,
    codes: Any,
    halves: Any,
    low: Any,
    high: Any,
    scratch: Any,
    spare_codes: Any,
) -> None:
    padded, num_lanes = block + _SPARE, max(block // 8, LINE)
    x, y, lanes = point(scratch, 0), point(scratch, padded), point(scratch, 4 * padded)
    spare, spare_kept = point(scratch, 2 * padded), point(scratch, 3 * padded)
    is_single, is_half = residual.size > 0, residual_halves.size > 0
    keeps = is_single or is_half
    ahead = max(block, _AHEAD)
    for b in range(halves.size):
        start, at = b * block, b * (block >> shift)
        m = min(block, own.size - start)
        num_bytes = (m + (1 << shift) - 1) >> shift
        # Where lines would end behind the block, it is worked on in scratch memory.
        fits = m == block and num_bytes % LINE == 0
        own_, kept, packed = point(own, start), point(residual, start), point(codes, at)
        kept_halves = point(residual_halves, start)
        values, out = own_ if fits else spare, packed if fits else point(spare_codes, 0)
        sent, left = own_ if fits and writes_own else spare, kept if fits and is_single else spare_kept
        if not fits:
            copy(own_, spare, m)
            copy(kept, spare_kept, m if is_single else 0)
        if is_half:
            _widen(kept_halves, left, m)
        # One term that is only read needs no sum.
        if num_rows > 1 or keeps or not fits:
            for r in range(num_rows):
                if r == own_index:
                    _add(values, left, keeps, factor, m, x, r == 0)
                else:
                    scale = bf16_to_f32(row_halves[r * (stride // 2) + first_scale + b])
                    row = _whole(point(rows, r * stride + at), num_bytes, spare_codes, fits)
                    unpack(kind, row, num_bytes, scale, y)
                    _add(y, y, False, factor, m, x, r == 0)
            values = x
        if not fits:
            for i in range(m, m + _SPARE):
                x[i] = 0
        scale = pack(
            kind, limit, values, m, lanes, num_lanes, not (keeps or writes_own), (out, sent, left), inverse,
            point(own_, ahead), point(kept if is_single else own_, ahead), (dithered, start, low, high),
        )  # fmt: skip
        halves[b] = f32_to_bf16(scale)
        if not fits:
            copy(spare_codes, packed, num_bytes)
            copy(spare_kept, kept, m if is_single else 0)
            copy(spare, own_, m if writes_own else 0)
        if is_half:
            _narrow(left, kept_halves, m)


@kernel((I8, I8, I8, U1[::1], U2[::1], F4[::1], numba.boolean, F4[::1], U1[::1]))
def _decode(
    kind: Any, block: Any, shift: Any, codes: Any, halves: Any, values: Any, streams: Any,
    scratch: Any, spare_codes: Any,
) -> None:  # fmt: skip
    y = point(scratch, 0)
    for b in range(halves.size):
        start, at = b * block, b * (block >> shift)
        m = min(block, values.size - start)
        num_bytes = (m + (1 << shift) - 1) >> shift
        fits = m == block and num_bytes % LINE == 0
        row, target = _whole(point(codes, at), num_bytes, spare_codes, fits), point(values, start)
        in_place = fits and not streams
        unpack(kind, row, num_bytes, bf16_to_f32(halves[b]), target if in_place else y)
        if not in_place:
            write(y, target, m, streams)
    fence()


_NO_VALUES, _NO_HALVES = np.empty(0, np.float32), np.empty(0, np.uint16)
_NO_ROWS = np.empty(0, np.uint8), np.empty(0, np.uint16), 1, 0
_ONE = np.float32(1)


def encode(form: BlockFormat, values: Tensor, residual: Tensor | None, row: Tensor, seed: Seed) -> None:
    # A sum of one term, which is not written back.
    _run(form, _NO_ROWS, values, 0, _ONE, _ONE, residual, row, seed, writes_own=False)


def decode(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    codes, scales = form.split(row, values.numel())
    runs = codes.numpy(), _halves(scales), values.numpy()
    _decode(*_numbers(form)[:3], *runs, streams_to(values), *_scratch(form))


def reduce(
    form: BlockFormat,
    rows: Tensor,
    own: Tensor,
    own_index: int,
    scale: float | Tensor,
    residual: Tensor | None,
    row: Tensor,
    seed: Seed,
) -> None:
    factors = np.float32(float(scale)), np.float32(1 / float(scale))
    flat = span(rows)
    others = flat.numpy(), _halves(flat), len(rows), rows.stride(0)
    _run(form, others, own, own_index, *factors, residual, row, seed, writes_own=True)


def _run(
    form: BlockFormat,
    rows: tuple[Any, Any, int, int],
    own: Tensor,
    own_index: int,
    factor: Any,
    inverse: Any,
    residual: Tensor | None,
    row: Tensor,
    seed: Seed,
    writes_own: bool,
) -> None:
    codes, scales = form.split(row, own.numel())
    kept, kept_halves = _NO_VALUES, _NO_HALVES
    if residual is not None and residual.dtype == torch.bfloat16:
        kept_halves = _halves(residual)
    elif residual is not None:
        kept = residual.numpy()
    _reduce(
        *_numbers(form),
        *rows,
        form.scales_offset(own.numel()) // 2,
        own.numpy(),
        own_index,
        factor,
        inverse,
        kept,
        kept_halves,
        writes_own,
        codes.numpy(),
        _halves(scales),
        *_words(seed),
        *_scratch(form),
    )


def _numbers(form: BlockFormat) -> tuple[Any, ...]:
    limit = np.float32(LIMITS.get(form.kind, 0.0))
    # A byte holds a power of two of values.
    shift = form.values_per_byte.bit_length() - 1
    return KINDS[form.kind], form.block, shift, limit, form.stochastic


def _scratch(form: BlockFormat) -> tuple[Any, Any]:
    """Room for a block four times and the sums of a block, and for its codes.

    torch's memory begins with a cache line; where numpy's does not, a line takes two accesses.
    """
    padded = form.block + _SPARE
    values = torch.empty(4 * padded + max(form.block // 8, LINE))
    return values.numpy(), torch.empty(padded, dtype=torch.uint8).numpy()


def _halves(values: Tensor) -> Any:
    return values.view(torch.uint16).numpy()


def _words(seed: Seed) -> tuple[Any, Any]:
    return np.uint32(seed.low).astype(np.int32), np.uint32(seed.high).astype(np.int32)
