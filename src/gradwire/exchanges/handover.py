"""Residuals of an exchange that another one takes over from."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.exchanges.context import Context
from gradwire.exchanges.rounds import Rounds
from gradwire.exchanges.skipped import mask_of_skipped

_NAME = "residual"
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def take_over_residuals(flat: Tensor, context: Context, kept: torch.dtype | None) -> Rounds:
    """Leave residuals of the dtype ``kept`` alone; others go into those, or, if None, into ``flat``.

    So nothing that an earlier recipe has held back is lost. A parameter that no rank has used in this
    step, whose gradient DDP will drop, keeps what it has.
    """
    memory, layout = context.memory, context.layout
    if layout.dtype.is_complex and kept is not None:
        return  # their states are of one dtype, whichever is kept
    for dtype in _DTYPES:
        if dtype == kept or not memory.has(_NAME, layout, dtype):
            continue
        old = memory.flat(_NAME, layout, dtype, flat.device)
        if kept is not None:
            memory.flat(_NAME, layout, kept, flat.device).add_(old)
        else:
            may_skip = context.may_skip and context.group.size > 1 and not layout.dtype.is_complex
            mask = (yield from mask_of_skipped(flat, context)) if may_skip else None
            flat.add_(old if mask is None else old.masked_fill(mask, 0))
            if mask is not None:
                old.masked_fill_(~mask, 0)
                continue
        memory.drop(_NAME, layout, dtype)
