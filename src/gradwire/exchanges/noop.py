"""No exchange at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.exchanges.scratch import Scratch
from gradwire.ops import Scale
from gradwire.transport import Group


@dataclass(frozen=True)
class Noop:
    """Leave every rank its own gradients: what a step would cost if communication were free."""

    communicates = False

    def run(self, flat: Tensor, group: Group, scratch: Scratch, scale: Scale) -> None:
        """Do nothing."""

    def wire_bytes(self, numel: int, dtype: torch.dtype, rank: int, world_size: int) -> int:
        return 0
