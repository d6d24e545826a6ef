"""The built-in model that a measurement trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_NUM_HEADS = 8


@dataclass(frozen=True)
class Workload:
    """A transformer encoder and the batch it gets. Raises ValueError for sizes that do not work.

    >>> print(Workload())
    transformer, 18.9M parameters, batch 2 x 64
    """

    name: str = "transformer"
    width: int = 512
    num_layers: int = 6
    batch: int = 2
    sequence: int = 64

    def __post_init__(self) -> None:
        if self.name != "transformer":
            raise ValueError(f"the only workload is 'transformer', not {self.name!r}")
        for size in ("width", "num_layers", "batch", "sequence"):
            if getattr(self, size) < 1:
                raise ValueError(f"a workload's {size} must be at least 1, not {getattr(self, size)}")
        if self.width % _NUM_HEADS:
            raise ValueError(
                f"the width must be a multiple of {_NUM_HEADS}, for as many attention heads, not {self.width}"
            )

    @property
    def num_parameters(self) -> int:
        """How many values are averaged in a step."""
        # Weights: 4 of width x width for attention, 8 for the MLP. The rest are biases and norms.
        return self.num_layers * (12 * self.width**2 + 13 * self.width)

    def model(self) -> nn.Module:
        """The model; the global random generator sets its weights."""
        return nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    self.width, _NUM_HEADS, 4 * self.width, dropout=0.0, batch_first=True
                )
                for _ in range(self.num_layers)
            )
        )

    def inputs(self) -> Tensor:
        """One batch of noise."""
        return torch.randn(self.batch, self.sequence, self.width)

    def loss(self, output: Tensor) -> Tensor:
        """Any loss will do, for nothing is learnt."""
        return output.square().mean()

    def __str__(self) -> str:
        scale, unit = (1e6, "M") if self.num_parameters >= 1e6 else (1e3, "k")
        count = f"{self.num_parameters / scale:.3g}{unit}"
        return f"{self.name}, {count} parameters, batch {self.batch} x {self.sequence}"
