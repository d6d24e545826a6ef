"""The optimizers of `convergence.py`."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Make the optimizer of examples/train_lm.py."""
    is_cuda = parameters[0].is_cuda
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1, fused=is_cuda)


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """Make SGD with momentum and nothing else, so that steps are sums of gradients."""
    return torch.optim.SGD(parameters, momentum=0.9, fused=parameters[0].is_cuda)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {"adamw": adamw, "sgd": sgd}
"""Factories by name. The learning rate is set before each step."""
