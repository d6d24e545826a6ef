"""The policy for averaged gradients that are not finite."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradwire.ddp.gradients import ModelGradients, local_gradient
from gradwire.torch_private import largest_magnitudes

OnNonfinite = Literal["propagate", "skip", "raise"]


def check_mode(mode: str) -> None:
    """Raise ValueError unless ``mode`` is an `OnNonfinite`."""
    if mode not in typing.get_args(OnNonfinite):
        raise ValueError(f"on_nonfinite must be 'propagate', 'skip' or 'raise', not {mode!r}")


@dataclass(frozen=True)
class _Copied:
    """The flags of a step on their way from the device to the host."""

    step: int
    names: list[str]
    is_finite: Tensor
    arrived: torch.cuda.Event


class NonfinitePolicy:
    """Check a model's averaged gradients after each backward pass.

    Where averaged gradients are the same on every rank, each rank decides alone, and all decide alike.
    Otherwise ranks ``agree``: that takes a flag for each parameter, and returns which are True on all ranks.
    """

    def __init__(
        self,
        mode: OnNonfinite,
        gradients: ModelGradients,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.num_skipped = 0
        self._mode = mode
        self._gradients = gradients
        self._agree = agree
        self._copied: _Copied | None = None

    def look(self, step: int) -> None:
        """Skip or raise if a gradient is not finite.

        On CUDA, skipping waits for the device, since the decision is needed at once. Raising does not wait:
        the error comes after the next backward pass.
        """
        trained = self._gradients.trained()
        names, is_finite = self._finite(trained)
        if self._agree is not None:
            found = dict(zip(names, is_finite.unbind(), strict=True))
            fine = torch.ones((), dtype=torch.bool, device=next(iter(trained.values())).device)
            names, is_finite = list(trained), torch.stack([found.get(name, fine) for name in trained])
            is_finite = self._agree(is_finite)
        if not names:
            return
        if self._mode == "skip":
            if not bool(is_finite.all()):
                self.num_skipped += 1
                self._gradients.clear()
            return
        if not is_finite.is_cuda:
            _raise_unless_finite(step, names, is_finite)
            return
        copied = is_finite.to("cpu", non_blocking=True)
        arrived = torch.cuda.current_stream(is_finite.device).record_event()
        self._conclude(_Copied(step, names, copied, arrived))

    def conclude(self) -> None:
        """Raise for the last step that `look` has looked at on CUDA, when no other follows."""
        self._conclude(None)

    def _conclude(self, following: _Copied | None) -> None:
        """Raise if a gradient of the step before was not finite; remember the one that follows."""
        before, self._copied = self._copied, following
        if before is not None:
            before.arrived.synchronize()  # no wait in practice: a whole step lies between
            _raise_unless_finite(before.step, before.names, before.is_finite)

    def _finite(self, trained: dict[str, nn.Parameter]) -> tuple[list[str], Tensor]:
        """Return the parameters that have gradients, and which of these are finite."""
        local = {name: local_gradient(parameter) for name, parameter in trained.items()}
        averaged = {name: _values(grad) for name, grad in local.items() if grad is not None}
        named = {name: values for name, values in averaged.items() if values.numel()}
        if not named:
            return [], torch.ones(0, dtype=torch.bool)
        # The largest magnitude takes one pass over memory, and is NaN if any value is.
        largest = largest_magnitudes(list(named.values()))
        return list(named), torch.stack(largest).isfinite()  # stack promotes to the widest dtype


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
