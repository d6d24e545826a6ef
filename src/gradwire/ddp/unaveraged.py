"""Warn of a model that is trained past its wire: by its ``.module``, or inside ``no_sync()`` for ever."""

from __future__ import annotations

import logging

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from gradwire.buckets import Layouts
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_slot import HookSlot
from gradwire.ddp.optimizer_steps import WatchedModel, add_watch

log = logging.getLogger("gradwire")

# The gradients of the first step may be older than the wire.
_NUM_STEPS = 3


class _Watch:
    """A wire that has averaged nothing yet, and the optimizer steps since it was attached."""

    def __init__(self, model: WatchedModel, layouts: Layouts) -> None:
        self._model, self._layouts = model, layouts
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """True if the wire has averaged or is detached, or the warning was given."""
        has_averaged = bool(self._layouts.current())
        return not self._model.is_attached or has_averaged or self._num_steps >= _NUM_STEPS

    def look(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer, and warn if there were too many."""
        if self.is_over:
            return
        gradients = [each for _, own in self._model.stepped_groups(optimizer) for each in own]
        self._num_steps += bool(gradients)
        if self._num_steps == _NUM_STEPS and not any(map(_is_nonzero, gradients)):
            self._num_steps = 0  # zeros that zero_grad has left: the optimizer trains another model
        elif self._num_steps == _NUM_STEPS:
            log.warning(
                "rank %d: %s has averaged nothing, though optimizers have taken %d steps: each rank trains "
                "alone. Call the DistributedDataParallel itself, not its .module, and run the last backward "
                "pass before a step outside of no_sync()",
                self._model.rank,
                self._model.wire_name,
                self._num_steps,
            )


def _is_nonzero(gradient: Tensor) -> bool:
    """Return True if a value is not zero; waits for the device."""
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def watch_for_steps(ddp: DistributedDataParallel, slot: HookSlot, bridge: Bridge, layouts: Layouts) -> None:
    """Warn once if optimizers step with gradients of the model, and DDP hands out no bucket."""
    if ddp.process_group.size() > 1:
        add_watch(_Watch(WatchedModel(ddp, slot, bridge), layouts))
