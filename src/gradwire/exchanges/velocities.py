"""Momentum that ranks apply to their gradients before they send them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradwire.exchanges.context import Context

_NAME = "velocity"


@contextmanager
def momentum_applied(
    momentum: float,
    dtype: torch.dtype | None,
    values: Tensor,
    mask: Tensor | None,
    context: Context,
    *,
    clears: bool,
) -> Iterator[None]:
    """Add a rank's velocity times ``momentum`` to its gradients; keep the sum, its new velocity, afterwards.

    Note [Momentum before sending]: a value that arrives late is a sum of many steps' gradients. An optimizer
    would begin to apply its momentum to all of them when they arrive. So ranks apply the momentum when a
    gradient is new, and the residual adds up velocities instead of gradients (Lin et al., arXiv:1712.01887,
    "momentum correction"). The optimizer must have no momentum.

    With ``clears``, velocities become zero wherever the averaged result is not zero ("momentum factor
    masking"): what has just been sent is old, and must not go on. Lin et al. clear what a rank has sent
    itself. Here all ranks clear the same values, so the sum of their velocities is one velocity, also where a
    node sends what its ranks have summed.

    A bucket whose result is not finite keeps its velocities: such a step is dropped. So does a parameter that
    is in the ``mask`` of unused ones, and a step that fails.
    """
    if not momentum or dtype is None:
        yield
        return
    velocity = context.memory.flat(_NAME, context.layout, dtype, values.device)
    values.add_(velocity, alpha=momentum)
    if mask is not None:
        values.masked_fill_(mask, 0)
    num_bytes = values.numel() * values.element_size()
    new = context.scratch.bytes(_NAME, num_bytes, values.device).view(values.dtype).copy_(values)
    yield
    if clears:
        new.masked_fill_(values != 0, 0)
    keeps = ~values.isfinite().all()
    velocity.copy_(torch.where(keeps if mask is None else keeps | mask, velocity, new))


def migrate_velocities(context: Context, kept: torch.dtype | None, device: torch.device) -> None:
    """Move velocities of other dtypes to dtype ``kept``; if that is None, forget them all."""
    memory, layout = context.memory, context.layout
    if layout.dtype.is_complex and kept is not None:
        return  # states of complex parameters have one dtype, whichever is kept
    for dtype in memory.dtypes(_NAME):
        if dtype == kept or not memory.has(_NAME, layout, dtype):
            continue
        if kept is not None:
            old = memory.flat(_NAME, layout, dtype, device)
            memory.flat(_NAME, layout, kept, device).add_(old)
        memory.drop(_NAME, layout, dtype)
