"""The optimizers of `convergence.py`."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire import Recipe


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Make the optimizer of examples/train_lm.py."""
    is_cuda = parameters[0].is_cuda
    return torch.optim.AdamW(
        parameters, betas=(0.9, 0.95), weight_decay=0.1, fused=is_cuda, capturable=is_cuda
    )


def make_optimizer(name: str, parameters: list[nn.Parameter], recipe: Recipe) -> Optimizer:
    """Make an optimizer by name; if the recipe applies a momentum itself, SGD without one."""
    optimizer = OPTIMIZERS[name](parameters)
    if recipe.momentum:
        require_sgd(name, recipe)
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
    return optimizer


def require_sgd(name: str, recipe: Recipe) -> None:
    """Raise ValueError if a recipe applies a momentum itself, and the optimizer is not SGD."""
    if recipe.momentum and name != "sgd":
        raise ValueError(f"{recipe} applies the momentum of SGD itself: give --optimizer sgd, not {name}")


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """Make SGD with momentum and nothing else, so that steps are sums of gradients."""
    return torch.optim.SGD(parameters, momentum=0.9, fused=parameters[0].is_cuda)


class LearningRate:
    """The learning rate of some optimizers; on a GPU it is in device memory, for steps that are recorded."""

    def __init__(self, optimizers: list[Optimizer], device: torch.device) -> None:
        self._optimizers = optimizers
        self._on_device = torch.zeros((), device=device) if device.type == "cuda" else None

    def set(self, value: float) -> None:
        if self._on_device is not None:
            self._on_device.fill_(value)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:  # made anew when a state is loaded
                group["lr"] = value if self._on_device is None else self._on_device


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {"adamw": adamw, "sgd": sgd}
"""Factories by name. The learning rate is set before each step."""
