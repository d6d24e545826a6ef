"""Private names of tensors, of the loss scale and of compiled models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

# Rows of `PRIVATE_NAMES`.
TENSOR_NAMES = (
    ("torch:Tensor._version", "finds gradients changed after backward()", "no such check"),
    ("torch:_foreach_copy_", "copies many tensors in one call", "a loop of copy_"),
    ("torch:_foreach_norm", "largest magnitudes in one call", "a loop of abs().max()"),
    ("torch.utils._pytree:tree_map_only", "moves a batch to a device", "torch.utils.pytree"),
    ("scaler:_scale", "residuals follow the loss scale", "GradScaler.get_scale, where the host waits"),
    ("compiled:_orig_mod", "the model inside torch.compile(model)", "refuse compiled models"),
)


def num_writes(tensor: Tensor) -> int:
    """Return a number that grows with each write to ``tensor``."""
    return tensor._version


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(list(targets), list(sources))


def largest_magnitudes(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return each tensor's largest magnitude; NaN if it holds one."""
    return tuple(torch._foreach_norm(list(tensors), ord=float("inf")))


def loss_scale_of(scaler: GradScaler) -> Tensor | None:
    """Return the scale of the loss, on its device; None before a loss has been scaled."""
    return scaler._scale


def uncompiled(model: Any) -> Any:
    """Return the model inside ``torch.compile(model)``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)
