"""The parts behind a `Wire`: the model's slot, the bridge in it, and the choice of recipe or hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.averaging import Engine, RunState, gather_states
from gradwire.buckets import Layouts
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.choice import Choice
from gradwire.ddp.hook_slot import HookSlot
from gradwire.ddp.runner import Runner
from gradwire.peers import CollectiveCall
from gradwire.torch_private import backward_pass


class Attachment:
    """The parts that one `attach` has put together; internal to gradwire.

    With ``GRADWIRE_DISABLE`` the bridge is not in the slot, and its engine averages nothing.
    """

    def __init__(
        self,
        slot: HookSlot,
        bridge: Bridge,
        choice: Choice,
        layouts: Layouts,
        timeout: timedelta,
        *,
        is_disabled: bool = False,
    ) -> None:
        self.slot = slot
        # A wire may outlive its model. The group is kept weakly: torch keeps it until it is destroyed.
        group: dist.ProcessGroup = slot.model.process_group
        self._group = weakref.ref(group)
        self.rank, self.world_size = group.rank(), group.size()
        self.bridge = bridge
        self.choice = choice
        self.layouts = layouts
        self.is_disabled = is_disabled
        # Kept here, since `wrap_runner` may put another runner around it.
        self.engine = bridge.runner if isinstance(bridge.runner, Engine) else None
        self._timeout = timeout

    @property
    def model(self) -> DistributedDataParallel:
        """The model whose gradients are averaged."""
        return self.slot.model

    @property
    def group(self) -> dist.ProcessGroup:
        """The model's process group; RuntimeError if it exists no more."""
        group = self._group()
        return self.model.process_group if group is None else group

    @property
    def state(self) -> RunState:
        """The state that a checkpoint holds; empty for a hook, which keeps its own."""
        return RunState() if self.engine is None else self.engine.state

    @property
    def is_attached(self) -> bool:
        """True while this attachment averages the model's gradients."""
        return self.slot.bridge is self.bridge

    @property
    def checks_nonfinite(self) -> bool:
        """True if ``on_nonfinite`` is ``"skip"`` or ``"raise"``."""
        return self.bridge.checks.policy is not None

    def call(self, method: str) -> CollectiveCall:
        """Return a collective call of ``method`` over the model's group; RuntimeError after `detach`."""
        if not (self.is_attached or self.is_disabled):
            what = method.rpartition(".")[2]
            raise RuntimeError(
                f"rank {self.rank}: this wire is detached, and {what} would have no effect; "
                "call it on the wire that gradwire.attach returned last"
            )
        return CollectiveCall(self.group, self._timeout, method)

    def save(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the state of this rank, or of all ranks; RuntimeError inside ``backward()``."""
        if backward_pass() != -1:
            raise RuntimeError(
                f"rank {self.rank}: Wire.state_dict was called inside backward(), where some residuals are "
                "those of this step and some are older; call it after backward() has returned"
            )
        state = self.state.save(self.choice.name, self.bridge.num_steps, self.rank, self.world_size)
        return gather_states(state, self.group, self._timeout, "Wire.state_dict") if gather else state

    def record_event(self, event: str, **details: str) -> None:
        """Record an event at the current step."""
        self.bridge.checks.record_event(event, self.bridge.num_steps, **details)

    def detach(self) -> None:
        """Leave the slot, and close the runner."""
        if not self.is_disabled:
            self.slot.leave(self.bridge)
            self.bridge.runner.close()
            self.record_event("detach")
            self.bridge.checks.close()

    def is_on(self, model: DistributedDataParallel) -> bool:
        """Return True if this is the model's attachment."""
        return self.slot.is_of(model)

    def wrap_runner(self, wrap: Callable[[Runner], Runner]) -> None:
        """Replace the runner by one around it."""
        self.bridge.runner = wrap(self.bridge.runner)

    def give_way(self, tell: Callable[[], None]) -> None:
        """Let a later `attach` replace this one: call ``tell`` and detach then, instead of refusing it."""

        def leave() -> None:
            self.slot.give_way = None
            if self.is_attached:
                tell()
                self.detach()

        self.slot.give_way = leave
