"""What is held back, in the units of a loss whose scale changes."""

from __future__ import annotations

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gradwire.buckets.memory import Memory


class LossScale:
    """Follows a scaler's scale: residuals are of gradients of the scaled loss.

    The scale stays on its device and so does the factor: on CUDA nobody waits for it, and residuals are
    multiplied in every step, mostly by one. All ranks see the same gradients, so their scalers have the
    same scale.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.held: Tensor | float | None = None
        """The scale that residuals are in; None before the first step: whatever that brings."""

    def follow(self, memory: Memory) -> None:
        """Bring what is held back to the scale of this step's loss; before its first exchange."""
        scale: Tensor | None = self._scaler._scale
        if scale is None:  # no loss has been scaled so far
            return
        now = scale.detach().double()  # a copy: the scaler changes its own in place
        if self.held is not None:
            factor = now / self.held
            if factor.is_cuda or factor != 1:
                memory.rescale("residual", factor)
        self.held = now
