"""Warn of a model that is trained past its wire: by its ``.module``, or inside ``no_sync()`` for ever."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradwire.buckets import Layouts
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_slot import HookSlot
from gradwire.ddp.models import trained_parameters

log = logging.getLogger("gradwire")

# The gradients of the first step may be older than the wire.
_NUM_STEPS = 3


class _Watch:
    """A wire that has averaged nothing yet, and the optimizer steps since it was attached."""

    def __init__(
        self, ddp: DistributedDataParallel, slot: HookSlot, bridge: Bridge, layouts: Layouts
    ) -> None:
        self._ddp, self._slot, self._bridge = weakref.ref(ddp), weakref.ref(slot), weakref.ref(bridge)
        self._layouts = layouts
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """True if the wire has averaged or is detached, or the warning was given."""
        slot = self._slot()
        is_attached = slot is not None and slot.bridge is not None and slot.bridge is self._bridge()
        return not is_attached or bool(self._layouts.current()) or self._num_steps >= _NUM_STEPS

    def count(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer, and warn if there were too many."""
        ddp, bridge = self._ddp(), self._bridge()
        if self.is_over or ddp is None or bridge is None:
            return
        own = {id(parameter) for parameter in trained_parameters(ddp).values()}
        stepped = (each for group in optimizer.param_groups for each in group["params"] if id(each) in own)
        gradients = [each.grad for each in stepped if each.grad is not None]
        self._num_steps += bool(gradients)
        if self._num_steps == _NUM_STEPS and not any(map(_is_nonzero, gradients)):
            self._num_steps = 0  # zeros that zero_grad has left: the optimizer trains another model
        elif self._num_steps == _NUM_STEPS:
            log.warning(
                "rank %d: %s has averaged nothing, though optimizers have taken %d steps: each rank trains "
                "alone. Call the DistributedDataParallel itself, not its .module, and run the last backward "
                "pass before a step outside of no_sync()",
                ddp.process_group.rank(),
                bridge.runner.name,
                self._num_steps,
            )


def _is_nonzero(gradient: Tensor) -> bool:
    """Return True if a value is not zero; waits for the device."""
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


_watches: list[_Watch] = []


def watch_for_steps(ddp: DistributedDataParallel, slot: HookSlot, bridge: Bridge, layouts: Layouts) -> None:
    """Warn once if optimizers step with gradients of the model, and DDP hands out no bucket."""
    _drop_those_over()
    if ddp.process_group.size() > 1:
        _watches.append(_Watch(ddp, slot, bridge, layouts))
        _hear_of_steps()


def _drop_those_over() -> None:
    _watches[:] = [watch for watch in _watches if not watch.is_over]


@functools.cache
def _hear_of_steps() -> None:
    """Hear of the steps of all optimizers from now on; a hook cannot be removed while one of them steps."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if _watches:
        _drop_those_over()
        for watch in _watches:
            watch.count(optimizer)
