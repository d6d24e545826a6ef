"""Parameters that have no gradient on any rank in a step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges.context import Context
from gradwire.exchanges.rounds import Round
from gradwire.exchanges.two_phase import Sum
from gradwire.ops import cached_on_owner


@contextmanager
def skipped_parameters(mask: Tensor | None, flat: Tensor, residual: Tensor | None) -> Iterator[None]:
    """Inside, parameters whose gradient is zero on every rank have no residual; then they have it back.

    DDP drops what a hook makes of a parameter that no rank has used, so a residual that were sent then
    would be lost. DDP does not say which those are; that all ranks have nothing but zeros is as good:
    they get zeros, and what is held back for them stays.
    """
    if mask is None or residual is None:
        yield
        return
    saved = residual.clone()
    residual.masked_fill_(mask, 0)
    try:
        yield
    finally:
        residual.copy_(torch.where(mask, saved, residual))
    flat.masked_fill_(mask, 0)


def mask_of_skipped(flat: Tensor, context: Context) -> Generator[Round, None, Tensor | None]:
    """True for each value of a parameter that is zero on every rank; None if there is none, on CPU."""
    layout = context.layout
    # An empty one has no largest value.
    views = [slot.view(flat) if slot.numel else flat.new_zeros(1) for slot in layout.slots]
    votes = (torch.stack(torch._foreach_norm(views, ord=float("inf"))) != 0).to(torch.bfloat16)
    yield (Sum(votes),)
    is_zero = votes == 0
    if not flat.is_cuda and not is_zero.any():  # on CUDA, looking would wait for the device
        return None
    return is_zero.repeat_interleave(_sizes(layout, flat.device), output_size=flat.numel())


@cached_on_owner
def _sizes(layout: BucketLayout, device: torch.device) -> Tensor:
    return torch.tensor([slot.numel for slot in layout.slots], device=device)
