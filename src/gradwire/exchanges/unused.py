"""Parameters that no rank has used in a step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges.context import Context
from gradwire.exchanges.rounds import Round
from gradwire.exchanges.scatter import Sum
from gradwire.ops import cached_on_owner
from gradwire.torch_private import largest_magnitudes


@contextmanager
def keep_unused_residuals(mask: Tensor | None, flat: Tensor, residual: Tensor | None) -> Iterator[None]:
    """Keep the residuals of the masked parameters out of an averaging, and set their averages to zero.

    DDP drops the averaged gradient of a parameter that no rank has used. A residual sent with it would be
    lost. DDP does not tell a hook which parameters those are, so the mask holds all whose gradient is zero
    on every rank. Their average is zero anyway.
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


def unused_mask(flat: Tensor, context: Context) -> Generator[Round, None, Tensor | None]:
    """Return a mask that is True for every value of a parameter whose gradient is zero on every rank.

    On CPU, return None if there is no such parameter.
    """
    layout = context.layout
    # An empty parameter has no largest value.
    views = [slot.view(flat) if slot.numel else flat.new_zeros(1) for slot in layout.slots]
    votes = (torch.stack(largest_magnitudes(views)) != 0).to(torch.bfloat16)
    yield (Sum(votes),)
    is_zero = votes == 0
    if not flat.is_cuda and not is_zero.any():  # on CUDA, the test would wait for the device
        return None
    return is_zero.repeat_interleave(_sizes(layout, flat.device), output_size=flat.numel())


@cached_on_owner
def _sizes(layout: BucketLayout, device: torch.device) -> Tensor:
    return torch.tensor([slot.numel for slot in layout.slots], device=device)
