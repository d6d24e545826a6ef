"""The models that a measurement trains: built-in ones, and a user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradwire.torch_private import tree_map_only

_NUM_HEADS = 8


@dataclass(frozen=True)
class BuiltWorkload:
    """A model, a batch, and a loss function of the model's output."""

    model: nn.Module
    batch: Any
    """The model's input: one argument, a tuple of several, or a dict of named ones."""
    loss: Callable[[Any], Tensor]

    def to(self, device: torch.device) -> BuiltWorkload:
        """Return the workload on ``device``."""
        return BuiltWorkload(
            self.model.to(device), tree_map_only(Tensor, lambda t: t.to(device), self.batch), self.loss
        )

    def step_loss(self, model: nn.Module) -> Tensor:
        """Return the loss of the batch with ``model``, which is this one or a wrapper of it.

        Raises TypeError if the loss function does not return one.
        """
        if isinstance(self.batch, tuple):
            output = model(*self.batch)
        else:
            output = model(**self.batch) if isinstance(self.batch, dict) else model(self.batch)
        loss: object = self.loss(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"the loss function must return a tensor of one value, not {found}")
        return loss


class Buildable(Protocol):
    """A workload that pickles, so that ranks can build it; ``str`` describes it."""

    def build(self) -> BuiltWorkload: ...


@dataclass(frozen=True)
class Workload:
    """A transformer encoder, or a ResNet-like stack of convolutions, and the size of its batch.

    Raises ValueError for an unknown name and for sizes that do not work.

    >>> print(Workload())
    transformer, 18.9M parameters, batch 2 x 64
    """

    name: str = "transformer"
    width: int = 512
    """Width of the transformer's embedding; channels of the ResNet."""
    num_layers: int = 6
    """Number of residual blocks, in either model."""
    batch: int = 2
    """Sequences or images per rank."""
    sequence: int = 64
    """Tokens per sequence; side of the ResNet's square images."""

    def __post_init__(self) -> None:
        if self.name not in ("transformer", "resnet"):
            raise ValueError(f"the workload must be 'transformer' or 'resnet', not {self.name!r}")
        for size in ("width", "num_layers", "batch", "sequence"):
            if getattr(self, size) < 1:
                raise ValueError(f"a workload's {size} must be at least 1, not {getattr(self, size)}")
        if self.name == "transformer" and self.width % _NUM_HEADS:
            raise ValueError(
                f"the width must be a multiple of {_NUM_HEADS}, the number of heads, not {self.width}"
            )

    @property
    def num_parameters(self) -> int:
        """Number of values that are averaged in a step."""
        if self.name == "resnet":
            # A block has two 3x3 kernels, and two norms with two values per channel. The first convolution
            # has 27 weights per channel.
            return self.num_layers * (18 * self.width**2 + 4 * self.width) + 27 * self.width
        # The weights are 4 width x width matrices for attention and 8 for the MLP. The rest are biases and
        # norms.
        return self.num_layers * (12 * self.width**2 + 13 * self.width)

    def model(self) -> nn.Module:
        """Return a model whose weights come from the global random generator."""
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
        """Return one batch of noise."""
        if self.name == "resnet":
            return torch.randn(self.batch, 3, self.sequence, self.sequence)
        return torch.randn(self.batch, self.sequence, self.width)

    def loss(self, output: Tensor) -> Tensor:
        """Return the mean squared difference of neighbours: it gives all weights a gradient."""
        # The outputs are normalised, so no weight would change their size.
        return (output - output.detach().roll(1, dims=1)).square().mean()

    def build(self) -> BuiltWorkload:
        """Return the model, one batch, and the loss."""
        return BuiltWorkload(self.model(), self.inputs(), self.loss)

    def __str__(self) -> str:
        count = format_count(self.num_parameters)
        return f"{self.name}, {count} parameters, batch {self.batch} x {self.sequence}"


class _ResidualBlock(nn.Module):
    """Two normalised 3x3 convolutions, added to their input (He et al., 2015)."""

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
    """A user's own model: a function ``package.module:factory`` that returns model, batch and loss.

    The batch is the model's input: one argument, a tuple of several, or a dict of named ones. The loss
    function takes the model's output. Raises ValueError if the factory cannot be imported.
    """

    spec: str
    """The function, as ``package.module:factory``."""

    def __post_init__(self) -> None:
        self._import()

    def build(self) -> BuiltWorkload:
        """Call the factory.

        Raises ValueError if the factory raises, and TypeError if it does not return a model, a batch and a
        loss function.
        """
        factory = self._import()
        try:
            made = factory()
        except Exception as error:
            raise ValueError(f"{self.spec} raises {type(error).__name__}: {error}") from error
        parts = made if isinstance(made, tuple) else (made,)
        if not (len(parts) == 3 and isinstance(parts[0], nn.Module) and callable(parts[2])):
            raise TypeError(
                f"{self.spec} must return a model, a batch and a loss function, not "
                f"{', '.join(type(part).__name__ for part in parts) or 'nothing'}"
            )
        return BuiltWorkload(*made)

    def _import(self) -> Callable[[], Any]:
        module, colon, name = self.spec.partition(":")
        if not (module and colon and name):
            raise ValueError(f"a model is given as package.module:factory, not {self.spec!r}")
        if module.endswith(".py") or "/" in module:
            raise ValueError(
                f"a model is given as package.module:factory, not by a file: write "
                f"{Path(module).stem}:{name}, in the folder of {Path(module).name} or with it in PYTHONPATH"
            )
        # The path of a console script leaves out the current folder, which has the user's code.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            factory: Callable[[], Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot import {self.spec}: {error}") from None
        except Exception as error:
            raise ValueError(
                f"cannot import {self.spec}: importing {module} raises {type(error).__name__}: {error}. Give "
                "a module that defines the function, and trains nothing when it is imported"
            ) from error
        if not callable(factory):
            raise ValueError(f"{self.spec} must be a function, not {type(factory).__name__}")
        return factory

    def __str__(self) -> str:
        return self.spec


def format_count(number: float) -> str:
    """Return a large number with three digits and a unit.

    >>> format_count(18_915_072), format_count(512)
    ('18.9M', '512')
    """
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:g}"
