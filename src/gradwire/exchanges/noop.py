"""No exchange at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.exchanges.context import Context
from gradwire.ops import Family


@dataclass(frozen=True)
class Noop:
    """Leave every rank its own gradients: what a step would cost if communication were free."""

    communicates = False
    kernels: ClassVar[frozenset[Family]] = frozenset()

    def run(self, flat: Tensor, context: Context) -> None:
        """Do nothing."""

    def wire_bytes(self, numel: int, dtype: torch.dtype, rank: int, world_size: int) -> int:
        return 0
