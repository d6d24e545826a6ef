"""Complex numbers as the pairs of real ones that travel."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.layout import BucketLayout


def as_real(flat: Tensor) -> Tensor:
    """The same values, those of a complex bucket as pairs."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def real_values(layout: BucketLayout) -> tuple[int, torch.dtype]:
    """How many values a bucket has by `as_real`, and of which dtype."""
    if layout.dtype.is_complex:
        return 2 * layout.numel, layout.dtype.to_real()
    return layout.numel, layout.dtype
