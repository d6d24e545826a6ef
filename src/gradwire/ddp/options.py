"""The options of `attach` beside the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gradwire.buckets import LossScale
from gradwire.ddp.gradients import ModelGradients
from gradwire.ddp.nonfinite import NonfinitePolicy, OnNonfinite, check_mode
from gradwire.ddp.step_checks import StepChecks
from gradwire.ddp.verification import Verification, check_interval
from gradwire.recipes import Recipe, require_averaging
from gradwire.telemetry import HasLayouts, Meter, Recorder, Telemetry


@dataclass(frozen=True)
class Options:
    """The options of one `attach`; TypeError or ValueError if one is invalid."""

    on_nonfinite: OnNonfinite = "propagate"
    verify_every: int = 0
    grad_scaler: GradScaler | None = None
    telemetry: Telemetry | None = None

    def __post_init__(self) -> None:
        check_mode(self.on_nonfinite)
        check_interval(self.verify_every)
        _require("grad_scaler", self.grad_scaler, GradScaler, "torch.amp.GradScaler")
        _require("telemetry", self.telemetry, Telemetry, "gradwire.Telemetry")
        if self.grad_scaler is not None and self.on_nonfinite != "propagate":
            raise ValueError(
                "a GradScaler must see gradients that are not finite, and skips such steps itself: leave "
                f"on_nonfinite={self.on_nonfinite!r} out"
            )

    def check(self, chosen: Recipe | Callable[..., Any], device: torch.device, *, is_nccl: bool) -> None:
        """Raise ValueError or TypeError if these options do not go with the recipe or hook, or the device."""
        if not isinstance(chosen, Recipe):
            if self.grad_scaler is not None:
                raise TypeError(
                    "grad_scaler= goes with a recipe; leave it out: a hook keeps its own residuals"
                )
            if self.verify_every and device.type != "cpu" and not is_nccl:
                raise ValueError(
                    f"verify_every= with a hook on {device.type} needs NCCL; otherwise leave it out"
                )
            return
        if self.on_nonfinite != "propagate":
            require_averaging(chosen, f"ranks would not {self.on_nonfinite} together")
        if self.verify_every:
            require_averaging(chosen, "verify_every would report a difference in every step; leave it out")

    def claim(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks."""
        return {
            "on_nonfinite": self.on_nonfinite,
            "verify_every": str(self.verify_every),
            "grad_scaler": "given" if self.grad_scaler is not None else "not given",
            "telemetry of errors": f"every {self.every} steps" if self.every is not None else "not asked for",
        }

    @property
    def every(self) -> int | None:
        """The number of steps between comparisons with exact averages; None for no comparison."""
        return self.telemetry.every if self.telemetry is not None and self.telemetry.errors else None

    def check_file(self, rank: int, *, is_first: bool) -> None:
        """Raise OSError if this rank's telemetry file cannot be written; the arguments are `Recorder`'s."""
        if self.telemetry is not None:
            self.telemetry.check_file(rank, is_first=is_first)

    def checks(
        self,
        gradients: ModelGradients,
        rank: int,
        layouts: HasLayouts,
        meter: Meter | None,
        *,
        is_first: bool,
        may_compare: Callable[[], bool] = lambda: True,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> StepChecks:
        """Return the checks and records of each backward pass; opens this rank's telemetry file.

        ``rank`` and ``is_first`` are as for `Recorder`. ``agree`` combines flags over ranks whose gradients
        differ, as for `NonfinitePolicy`; gradients are only verified when they ``may_compare``.
        """
        policy = verification = recorder = None
        if self.on_nonfinite != "propagate":
            policy = NonfinitePolicy(self.on_nonfinite, gradients, agree)
        if self.verify_every:
            verification = Verification(self.verify_every, gradients, may_compare)
        if self.telemetry is not None:
            recorder = Recorder(self.telemetry, rank, layouts, meter, is_first=is_first)
        return StepChecks(policy, verification, recorder)

    def loss_scale(self) -> LossScale | None:
        """Return the loss scale that residuals follow; None if the loss is not scaled."""
        if self.grad_scaler is None or not self.grad_scaler.is_enabled():
            return None
        return LossScale(self.grad_scaler)

    def meter(self) -> Meter | None:
        """Return the meter that compares averages with exact ones; None if telemetry does not ask for it."""
        return None if self.every is None else Meter(self.every)


def _require(name: str, value: object, kind: type, wanted: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a {wanted}, not {type(value).__name__}")
