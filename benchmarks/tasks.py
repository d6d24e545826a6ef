"""The tasks of `convergence.py`: a language model on text, or a convolutional network on images."""

import sys
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from images import ConvNet, Images
from runs import Setting

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lm import LM, corpus, pieces, starts


class Data(Protocol):
    """Data to train on, or to evaluate with."""

    device: torch.device

    def to(self, device: torch.device) -> "Data": ...

    def draw(self, shape: tuple[int, ...], seed: int) -> Tensor:
        """Draw places in the data, on its device."""
        ...

    def batch(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs at these places, and their targets."""
        ...


class Text:
    """A text, in pieces of ``length`` bytes."""

    def __init__(self, text: Tensor, length: int) -> None:
        self._text, self._length = text, length
        self.device = text.device

    def to(self, device: torch.device) -> "Text":
        return Text(self._text.to(device), self._length)

    def draw(self, shape: tuple[int, ...], seed: int) -> Tensor:
        return starts(self._text, shape, self._length, seed)

    def batch(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return pieces(self._text, places, self._length)


def data_of(setting: Setting, device: torch.device) -> tuple[Data, Data]:
    """Return the data to train on, and the data held out."""
    if setting.data == "images":
        pair: tuple[Data, Data] = Images.make(setting.length)
    else:
        text, held_out = corpus()
        pair = Text(text, setting.length), Text(held_out, setting.length)
    return pair[0].to(device), pair[1].to(device)


def model_of(setting: Setting) -> nn.Module:
    """Return a new model, whose forward pass takes inputs and targets and returns the loss."""
    if setting.data == "images":
        return ConvNet(setting.width, setting.layers)
    return LM(setting.width, setting.layers, setting.length)


def loss_of(model: nn.Module, data: Data, places: Tensor) -> Tensor:
    """Return the mean loss at these places."""
    with torch.autocast("cuda", torch.bfloat16, enabled=places.is_cuda, cache_enabled=False):
        loss: Tensor = model(*data.batch(places))
    return loss
