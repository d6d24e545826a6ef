"""The state of a run, which a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.averaging import checkpoint
from gradwire.averaging.grid import Grid
from gradwire.averaging.timeline import Timeline
from gradwire.buckets import LossScale, Memory


@dataclass
class RunState:
    """States by parameter, the timeline of groupings, and the loss scale that residuals include."""

    memory: Memory = field(default_factory=Memory)
    timeline: Timeline = field(default_factory=Timeline)
    loss_scale: LossScale | None = None
    """None if the loss is not scaled."""

    def save(
        self, recipe: str, step: int, rank: int, grid: Grid, tuning: str | None = None
    ) -> dict[str, Any]:
        """Return this rank's state as tensors and numbers; ``tuning`` is that of recipe ``auto``."""
        held = None if self.loss_scale is None else self.loss_scale.residual_scale
        scale = None if held is None else float(held)
        timeline, memory = self.timeline.save(step), self.memory.state_dict()
        return checkpoint.write(recipe, step, timeline, memory, rank, grid, scale, tuning)

    def load(self, saved: checkpoint.Saved, device: torch.device) -> None:
        """Load a state that has been checked."""
        self.memory.load_state_dict(saved.memory, device)
        self.timeline.load(saved.step, saved.timeline)
        if self.loss_scale is not None:
            self.loss_scale.residual_scale = saved.loss_scale
        elif saved.loss_scale is not None:  # the loss was scaled, and is not any more
            self.memory.rescale(torch.tensor(1 / saved.loss_scale, dtype=torch.float64))
