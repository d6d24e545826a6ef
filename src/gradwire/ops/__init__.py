"""Element-wise kernels over flat tensors: numba for fp32 values on CPU, torch for everything else.

`reference` is the truth; the kernels in `cpu` equal it bit for bit, except that a NaN may differ from
another NaN in its payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from gradwire.ops import reference

Scale = float | Tensor

# What the numba kernels read from a row.
_ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reduce_rows(
    rows: Tensor,
    header_bytes: int,
    own: Tensor,
    own_index: int,
    scales: Sequence[Scale],
    up: Scale,
    down: Scale,
    encoded: Tensor,
) -> None:
    """Sum in order, encode the sum, and decode it again: ``own = encoded * down``.

    ``encoded = (sum over r of values[r] * scales[r]) * up``. ``values[own_index]`` is ``own``; every
    other one lies in ``rows[r]``, a row of bytes, behind a header, in the dtype of ``encoded``. Sums in
    fp32, in fp64 when ``own`` is fp64, with each product rounded before it is added, so that a sum
    depends neither on a value's position nor on who owns it. ``encoded`` may be ``own``, for values that
    travel as they are.
    """
    if _fast(own) and encoded.dtype in _ROW_DTYPES:
        _cpu().reduce_rows(rows, header_bytes, own, own_index, scales, up, down, encoded)
    else:
        reference.reduce_rows(rows, header_bytes, own, own_index, scales, up, down, encoded)


def cast_scaled(values: Tensor, scale: Scale, out: Tensor) -> None:
    """``out = values * scale``, multiplied in the wider of the two dtypes, at least fp32."""
    if _fast(values) and out.dtype == torch.float16:
        _cpu().encode_fp16(values, scale, out)
    elif _fast(out) and values.dtype == torch.float16:
        _cpu().decode_fp16(values, scale, out)
    else:
        reference.cast_scaled(values, scale, out)


def absmax(values: Tensor) -> Tensor:
    """The largest magnitude as a 0-d fp32 tensor; not finite if any value is not."""
    return _cpu().absmax(values) if _fast(values) else reference.absmax(values)


def warm_up(device: torch.device) -> None:
    """Compile the kernels for ``device``, or read them from the cache, before they are needed."""
    if device.type == "cpu":
        _cpu()


def _fast(*tensors: Tensor) -> bool:
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def _cpu() -> ModuleType:
    # Imported on first use: numba takes 0.2 s, and a program that never trains never needs it.
    from gradwire.ops import cpu

    return cpu
