"""Residuals and velocities that an earlier recipe has left behind."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.exchanges.context import Context
from gradwire.exchanges.rounds import Rounds
from gradwire.exchanges.unused import unused_mask
from gradwire.exchanges.velocities import migrate_velocities

_NAME = "residual"


def add_to_shard(own: Tensor, context: Context) -> None:
    """Add residuals that replicas of this rank's shard have left behind; a reduce-scatter keeps none."""
    memory, layout = context.memory, context.layout
    migrate_velocities(context, None, own.device)
    for dtype in memory.dtypes(_NAME):
        if memory.has(_NAME, layout, dtype):
            left_out = memory.flat(_NAME, layout.shard(), dtype, own.device)
            own.add_(left_out, alpha=context.divisor)
            memory.drop(_NAME, layout, dtype)


def migrate_residuals(
    flat: Tensor, context: Context, kept: torch.dtype | None, *, momentum: float = 0.0
) -> Rounds:
    """Add residuals of other dtypes to those of dtype ``kept``; if that is None, add them to ``flat``.

    So nothing that an earlier recipe has held back is lost. DDP drops the gradient of a parameter that no
    rank has used in this step. Such a parameter keeps its residual. Velocities move to dtype ``kept`` too;
    without a ``momentum`` they are forgotten.
    """
    memory, layout = context.memory, context.layout
    migrate_velocities(context, kept if momentum else None, flat.device)
    if layout.dtype.is_complex and kept is not None:
        return  # states of complex parameters have one dtype, whichever is kept
    for dtype in memory.dtypes(_NAME):
        if dtype == kept or not memory.has(_NAME, layout, dtype):
            continue
        old = memory.flat(_NAME, layout, dtype, flat.device)
        if kept is not None:
            memory.flat(_NAME, layout, kept, flat.device).add_(old)
        else:
            votes = context.may_have_unused and context.group.size > 1 and not layout.dtype.is_complex
            mask = (yield from unused_mask(flat, context)) if votes else None
            flat.add_(old if mask is None else old.masked_fill(mask, 0))
            if mask is not None:
                old.masked_fill_(~mask, 0)
                continue
        memory.drop(_NAME, layout, dtype)
