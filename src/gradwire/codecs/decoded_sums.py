"""A sum over ranks for codecs without a kernel of their own for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.ops import Scale


def sum_decoded(
    values: Tensor, rows: Tensor, rank: int, scale: Scale, decode: Callable[[int, Tensor], None]
) -> None:
    """Replace ``values``, those of ``rank``, by the sum of all ranks' values times ``scale``, in rank order.

    ``decode(r, term)`` decodes the row of rank r to ``term``.
    """
    term, total = torch.empty_like(values), torch.zeros_like(values)
    for r in range(len(rows)):
        if r != rank:
            decode(r, term)
        total.add_(values * scale if r == rank else term.mul_(scale))
    values.copy_(total)
