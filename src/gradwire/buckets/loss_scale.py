"""Residuals and velocities in the units of a loss whose scale changes."""

from __future__ import annotations

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gradwire.buckets.memory import Memory
from gradwire.torch_private import loss_scale_of


class LossScale:
    """The scale of the loss whose gradients residuals belong to, as a ``GradScaler`` changes it.

    Velocities follow it with the residuals. The scale and the factor stay on their device, so on CUDA the
    host does not wait for them. There, residuals are multiplied in every step, mostly by one. All ranks see
    the same gradients, so their scalers have the same scale.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.residual_scale: Tensor | float | None = None
        """The scale that residuals are in; None before the first step, which sets it."""

    def follow(self, memory: Memory) -> None:
        """Bring residuals to the scale of this step's loss; call it before the step's first exchange."""
        scale = loss_scale_of(self._scaler)
        if scale is None:  # no loss has been scaled so far
            return
        now = scale.detach().double()  # a copy: the scaler changes its own in place
        if self.residual_scale is not None:
            factor = now / self.residual_scale
            if factor.is_cuda or factor != 1:
                memory.rescale(factor)
        self.residual_scale = now
