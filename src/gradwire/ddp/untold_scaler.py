"""Warn of a ``GradScaler`` that scales a model's loss, and that its wire was not given."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Protocol

from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from gradwire.ddp.optimizer_steps import add_watch

log = logging.getLogger("gradwire")


class SteppedModel(Protocol):
    """A model with a wire, which a watch does not keep alive."""

    rank: int

    @property
    def is_attached(self) -> bool: ...

    @property
    def wire_name(self) -> str: ...

    @property
    def holds_gradients(self) -> bool: ...

    def is_stepped_by(self, optimizer: Optimizer) -> bool: ...


class _Watch:
    """A wire, until the first optimizer steps its model after it has held something back."""

    def __init__(self, model: SteppedModel, given: GradScaler | None) -> None:
        self._model, self._given = model, given
        self._has_seen = False

    @property
    def is_over(self) -> bool:
        """True if such a step was seen, or the wire is detached."""
        return self._has_seen or not self._model.is_attached

    def look(self, optimizer: Optimizer) -> None:
        """Warn if a scaler steps the optimizer, and is not the one given."""
        if not self._model.holds_gradients or not self._model.is_stepped_by(optimizer):
            return
        self._has_seen = True
        scaler = _stepping_scaler()
        if scaler is not None and scaler.is_enabled() and scaler is not self._given:
            log.warning(
                "rank %d: a GradScaler scales the loss, and %s was not given it: what it holds back keeps "
                "the old scale when the scale changes. Pass it: gradwire.attach(model, recipe, "
                "grad_scaler=scaler), or use a recipe that holds nothing back, such as int8",
                self._model.rank,
                self._model.wire_name,
            )


def _stepping_scaler() -> GradScaler | None:
    """Return the scaler whose ``step`` is running; None if an optimizer was stepped without one."""
    # An optimizer does not know its scaler, but is called by it. Other frames' f_locals are not read: before
    # Python 3.13 that would keep a loop's tensors until it ends.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == GradScaler.__module__:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
        frame = frame.f_back
    return None


def watch_for_scaler(model: SteppedModel, given: GradScaler | None) -> None:
    """Warn once if a recipe holds gradients back in units of a scaled loss, and does not see its scale."""
    add_watch(_Watch(model, given))
