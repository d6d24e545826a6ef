"""No exchange at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.exchanges.context import Context


@dataclass(frozen=True)
class Noop:
    """Leave every rank its own gradients: what a step would cost if communication were free."""

    communicates = False

    def run(self, flat: Tensor, context: Context) -> None:
        """Do nothing."""

    def wire_bytes(self, numel: int, dtype: torch.dtype, rank: int, world_size: int) -> int:
        return 0
