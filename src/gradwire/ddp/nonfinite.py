"""The policy for averaged gradients that are not finite."""

from __future__ import annotations

import typing
import weakref
from typing import Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.models import trained_parameters
from gradwire.torch_private import largest_magnitudes

OnNonfinite = Literal["propagate", "skip", "raise"]


def check_mode(mode: str) -> None:
    """Raise ValueError unless ``mode`` is an `OnNonfinite`."""
    if mode not in typing.get_args(OnNonfinite):
        raise ValueError(f"on_nonfinite must be 'propagate', 'skip' or 'raise', not {mode!r}")


class NonfinitePolicy:
    """Check a model's averaged gradients after each backward pass.

    Averaged gradients are the same on every rank, so each rank decides alone, and all decide alike.
    """

    def __init__(self, mode: OnNonfinite, ddp: DistributedDataParallel) -> None:
        self.num_skipped = 0
        self._mode = mode
        self._ddp = weakref.ref(ddp)  # weakly: the model's hook holds this
        self._pending: tuple[int, list[str], Tensor, torch.cuda.Event] | None = None

    def look(self, step: int) -> None:
        """Skip or raise if a gradient is not finite.

        On CUDA, skipping waits for the device, since the decision is needed at once. Raising does not wait:
        the error comes after the next backward pass.
        """
        ddp = self._ddp()
        assert ddp is not None, "the model is gone"
        # Parameters that DDP ignores differ between ranks, and would make ranks decide differently.
        averaged = {
            name: _values(p.grad) for name, p in trained_parameters(ddp).items() if p.grad is not None
        }
        named = {name: values for name, values in averaged.items() if values.numel()}
        if not named:
            return
        # The largest magnitude takes one pass over memory, and is NaN if any value is.
        largest = largest_magnitudes(list(named.values()))
        is_finite = torch.stack(largest).isfinite()  # stack promotes to the widest dtype
        if self._mode == "skip":
            if not bool(is_finite.all()):
                self.num_skipped += 1
                for parameter in ddp.module.parameters():
                    parameter.grad = None
            return
        names = list(named)
        if not is_finite.is_cuda:
            _raise_unless_finite(step, names, is_finite)
            return
        before = self._pending
        copied = is_finite.to("cpu", non_blocking=True)
        self._pending = step, names, copied, torch.cuda.current_stream(is_finite.device).record_event()
        if before is not None:
            before[-1].synchronize()  # no wait in practice: a whole step lies between
            _raise_unless_finite(*before[:-1])


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _raise_unless_finite(step: int, names: list[str], is_finite: Tensor) -> None:
    bad = [name for name, good in zip(names, is_finite.tolist(), strict=True) if not good]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise FloatingPointError(
            f"step {step}: the averaged gradient of {bad[0]}{more} is not finite, on every rank; "
            "on_nonfinite='skip' leaves such steps out"
        )
