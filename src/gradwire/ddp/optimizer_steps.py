"""Watches that hear of the steps of all optimizers, to warn of what no error shows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradwire.averaging import Engine
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_slot import HookSlot
from gradwire.ddp.models import trained_parameters
from gradwire.peers import own_world_rank


class Watch(Protocol):
    """A question that the next steps of optimizers answer."""

    @property
    def is_over(self) -> bool:
        """True if further steps tell nothing."""
        ...

    def look(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that has stepped."""
        ...


class WatchedModel:
    """A model and its wire, neither of which a watch keeps alive."""

    def __init__(self, ddp: DistributedDataParallel, slot: HookSlot, bridge: Bridge) -> None:
        self._ddp, self._slot, self._bridge = weakref.ref(ddp), weakref.ref(slot), weakref.ref(bridge)
        self.rank = own_world_rank(ddp.process_group)

    @property
    def is_attached(self) -> bool:
        """True while the model has this wire."""
        slot = self._slot()
        return slot is not None and slot.bridge is not None and slot.bridge is self._bridge()

    @property
    def wire_name(self) -> str:
        """The name of the recipe or hook."""
        bridge = self._bridge()
        return "" if bridge is None else bridge.runner.name

    @property
    def holds_gradients(self) -> bool:
        """True if a recipe holds gradients back, or has held some back."""
        bridge = self._bridge()
        runner = None if bridge is None else bridge.runner
        return isinstance(runner, Engine) and runner.state.memory.holds_gradients

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has gradients of the model."""
        return any(True for _ in self.stepped_groups(optimizer))

    def stepped_groups(self, optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Yield the groups of an optimizer with gradients of the model, each with those gradients."""
        ddp = self._ddp()
        own = set() if ddp is None else {id(parameter) for parameter in trained_parameters(ddp).values()}
        for group in optimizer.param_groups:
            gradients = [p.grad for p in group["params"] if id(p) in own and p.grad is not None]
            if gradients:
                yield group, gradients


_watches: list[Watch] = []


def add_watch(watch: Watch) -> None:
    """Let a watch look at every optimizer that steps, until it is over."""
    _drop_those_over()
    _watches.append(watch)
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
            watch.look(optimizer)
