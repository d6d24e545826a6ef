"""Warn of an optimizer that applies a momentum again, after a recipe has applied it."""

from __future__ import annotations

import logging

from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_slot import HookSlot
from gradwire.ddp.optimizer_steps import WatchedModel, add_watch
from gradwire.recipes import Recipe

log = logging.getLogger("gradwire")


class _Watch:
    """A wire whose recipe applies a momentum, until the first optimizer has stepped its model."""

    def __init__(self, model: WatchedModel, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._has_seen = False

    @property
    def is_over(self) -> bool:
        """True if an optimizer has stepped the model, or the wire is detached."""
        return self._has_seen or not self._model.is_attached

    def look(self, optimizer: Optimizer) -> None:
        """Warn if an optimizer that steps the model has a momentum."""
        for group, _ in self._model.stepped_groups(optimizer):
            self._has_seen = True
            if group.get("momentum"):
                log.warning(
                    "rank %d: %s applies a momentum before it sends, and %s applies its own of %s to the "
                    "result: steps are far too large. Give the optimizer momentum=0",
                    self._model.rank,
                    self._recipe,
                    type(optimizer).__name__,
                    group["momentum"],
                )
                return


def watch_for_momentum(
    ddp: DistributedDataParallel, slot: HookSlot, bridge: Bridge, recipe: Recipe | None
) -> None:
    """Warn once if all of a model has a recipe with a momentum, and an optimizer has one as well."""
    if recipe is not None and all(each.momentum for each in recipe.leaves()):
        add_watch(_Watch(WatchedModel(ddp, slot, bridge), recipe))
