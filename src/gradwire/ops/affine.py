"""8-bit codes for the range from a block's smallest value to its largest, in torch, for every device.

The range of a block always includes zero, which has a code of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.ops.formats import MIN_SCALE

_LARGEST_CODE = 255


def encode(values: Tensor, block: int, codes: Tensor, ranges: Tensor) -> None:
    """Write the codes of ``values``, and for each block its step and the code of zero."""
    for part, out, range_ in _blocks(values, block, codes, ranges):
        low, high = torch.aminmax(part, dim=1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        # Each is divided first: their difference may overflow fp32.
        step = (high / _LARGEST_CODE - low / _LARGEST_CODE).clamp(min=MIN_SCALE)
        step = torch.where(step.isfinite(), step, torch.nan)
        zero = (-low / step).round()
        range_.copy_(torch.cat([step, zero], dim=1))
        code = (part / step).add_(zero).round_().clamp_(0, _LARGEST_CODE)
        out.copy_(code.nan_to_num_(0.0))


def decode(codes: Tensor, ranges: Tensor, block: int, values: Tensor) -> None:
    """Write the values of ``codes``; NaN in a block that was not finite."""
    for part, code, range_ in _blocks(values, block, codes, ranges):
        torch.sub(code, range_[:, 1:], out=part)
        part.mul_(range_[:, :1])


def _blocks(
    values: Tensor, block: int, codes: Tensor, ranges: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield values, codes and ranges with a row per block: first of the full blocks, then of the rest."""
    num_full = values.numel() // block
    split = num_full * block
    if num_full:
        yield values[:split].view(-1, block), codes[:split].view(-1, block), ranges[:num_full]
    if split < values.numel():
        yield values[split:].view(1, -1), codes[split:].view(1, -1), ranges[num_full:]
