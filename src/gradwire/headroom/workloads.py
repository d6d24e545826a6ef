"""What a measurement trains: the built-in models, and a user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_NUM_HEADS = 8


@dataclass(frozen=True)
class Built:
    """A model, a batch of it, and the loss of its output."""

    model: nn.Module
    batch: Any
    """What the model takes: one argument, a tuple of them, or a dict of them by name."""
    loss: Callable[[Any], Tensor]

    def to(self, device: torch.device) -> Built:
        """All of it on ``device``."""
        return Built(
            self.model.to(device), tree_map_only(Tensor, lambda t: t.to(device), self.batch), self.loss
        )

    def step_loss(self, model: nn.Module) -> Tensor:
        """The loss of ``model``, this one or a wrapper of it, for the batch."""
        if isinstance(self.batch, tuple):
            return self.loss(model(*self.batch))
        if isinstance(self.batch, dict):
            return self.loss(model(**self.batch))
        return self.loss(model(self.batch))


class Buildable(Protocol):
    """A workload as a value: it goes to the ranks, which build it; ``str`` describes it."""

    def build(self) -> Built: ...


@dataclass(frozen=True)
class Workload:
    """A transformer encoder, or a ResNet-like stack of convolutions, and the batch it gets.

    Raises ValueError for sizes that do not work.

    >>> print(Workload())
    transformer, 18.9M parameters, batch 2 x 64
    """

    name: str = "transformer"
    width: int = 512
    """Of the embedding; the channels of a ResNet."""
    num_layers: int = 6
    """Residual blocks, in either."""
    batch: int = 2
    sequence: int = 64
    """Tokens of a sequence; the side of a ResNet's square images."""

    def __post_init__(self) -> None:
        if self.name not in ("transformer", "resnet"):
            raise ValueError(f"the workloads are 'transformer' and 'resnet', not {self.name!r}")
        for size in ("width", "num_layers", "batch", "sequence"):
            if getattr(self, size) < 1:
                raise ValueError(f"a workload's {size} must be at least 1, not {getattr(self, size)}")
        if self.name == "transformer" and self.width % _NUM_HEADS:
            raise ValueError(
                f"the width must be a multiple of {_NUM_HEADS}, for as many attention heads, not {self.width}"
            )

    @property
    def num_parameters(self) -> int:
        """How many values are averaged in a step."""
        if self.name == "resnet":
            # Of a block two 3x3 kernels and norms of two values a channel; 27 weights a channel before.
            return self.num_layers * (18 * self.width**2 + 4 * self.width) + 27 * self.width
        # Weights: 4 of width x width for attention, 8 for the MLP. The rest are biases and norms.
        return self.num_layers * (12 * self.width**2 + 13 * self.width)

    def model(self) -> nn.Module:
        """The model; the global random generator sets its weights."""
        if self.name == "resnet":
            stem = nn.Conv2d(3, self.width, 3, padding=1, bias=False)
            return nn.Sequential(stem, *(_ResidualBlock(self.width) for _ in range(self.num_layers)))
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
        if self.name == "resnet":
            return torch.randn(self.batch, 3, self.sequence, self.sequence)
        return torch.randn(self.batch, self.sequence, self.width)

    def loss(self, output: Tensor) -> Tensor:
        """How far neighbours are apart: nothing is learnt, but all weights have gradients."""
        # The size of outputs would not do: they are normalised, so no weight changes it.
        return (output - output.detach().roll(1, dims=1)).square().mean()

    def build(self) -> Built:
        return Built(self.model(), self.inputs(), self.loss)

    def __str__(self) -> str:
        return (
            f"{self.name}, {count_of(self.num_parameters)} parameters, batch {self.batch} x {self.sequence}"
        )


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions, normalised, and a way around them (He et al., 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = values + self.layers(values)
        return out


@dataclass(frozen=True)
class ModelFactory:
    """A user's own model: ``package.module:factory``, which returns model, batch and loss function.

    The batch is what the model takes (a tuple for several arguments, a dict for named ones); the loss
    function takes what it returns. Raises ValueError if the factory cannot be imported.
    """

    spec: str

    def __post_init__(self) -> None:
        self._import()

    def build(self) -> Built:
        made = self._import()()
        parts = made if isinstance(made, tuple) else (made,)
        if not (len(parts) == 3 and isinstance(parts[0], nn.Module) and callable(parts[2])):
            raise TypeError(
                f"{self.spec} must return a model, a batch and a loss function, not "
                f"{', '.join(type(part).__name__ for part in parts) or 'nothing'}"
            )
        return Built(*made)

    def _import(self) -> Callable[[], Any]:
        module, colon, name = self.spec.partition(":")
        if not (module and colon and name):
            raise ValueError(f"a model is given as package.module:factory, not {self.spec!r}")
        # A console script's own path leaves the current folder out, where the user's code is.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            factory: Callable[[], Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot import {self.spec}: {error}") from None
        if not callable(factory):
            raise ValueError(f"{self.spec} must be a function, not {type(factory).__name__}")
        return factory

    def __str__(self) -> str:
        return self.spec


def count_of(number: float) -> str:
    """A count for people.

    >>> count_of(18_915_072), count_of(512)
    ('18.9M', '512')
    """
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:g}"
