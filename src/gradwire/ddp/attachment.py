"""What stands behind a `Wire`: a model's slot, the bridge in it, and what was chosen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.averaging import Engine, RunState
from gradwire.buckets import Layouts
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.choice import Choice
from gradwire.ddp.hook_slot import HookSlot
from gradwire.ddp.runner import Runner
from gradwire.peers import CollectiveCall


class Attachment:
    """The parts of gradwire that one `attach` has put together; for gradwire's own packages.

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
        self.bridge = bridge
        self.choice = choice
        self.layouts = layouts
        self.is_disabled = is_disabled
        # Kept apart: a runner of another kind may be put around it.
        self.engine = bridge.runner if isinstance(bridge.runner, Engine) else None
        self._timeout = timeout

    @property
    def model(self) -> DistributedDataParallel:
        """The model whose gradients are averaged."""
        return self.slot.model

    @property
    def group(self) -> dist.ProcessGroup:
        """The model's process group."""
        return self.model.process_group

    @property
    def state(self) -> RunState:
        """The state that a checkpoint holds; empty for a hook, which keeps its own."""
        return RunState() if self.engine is None else self.engine.state

    @property
    def is_attached(self) -> bool:
        """True while the model's gradients go this way."""
        return self.slot.bridge is self.bridge

    @property
    def looks_at_gradients(self) -> bool:
        """True if gradients that are not finite are skipped or raised for."""
        return self.bridge.checks.policy is not None

    def call(self, method: str) -> CollectiveCall:
        """Return a collective call over the model's group; RuntimeError after `detach`."""
        if not (self.is_attached or self.is_disabled):
            what = method.rpartition(".")[2]
            raise RuntimeError(
                f"rank {self.group.rank()}: this wire is detached, and {what} would have no effect; "
                "call it on the wire that gradwire.attach returned last"
            )
        return CollectiveCall(self.group, self._timeout, method)

    def tell(self, event: str, **details: str) -> None:
        """Record an event at the current step."""
        self.bridge.checks.tell(event, self.bridge.num_steps, **details)

    def detach(self) -> None:
        """Leave the slot, and end the runner."""
        if not self.is_disabled:
            self.slot.leave(self.bridge)
            self.bridge.runner.close()
            self.tell("detach")
            self.bridge.checks.close()

    def is_on(self, model: DistributedDataParallel) -> bool:
        """Return True if this is the model's attachment."""
        return self.slot.is_of(model)

    def wrap_runner(self, wrap: Callable[[Runner], Runner]) -> None:
        """Put a runner around the one that averages."""
        self.bridge.runner = wrap(self.bridge.runner)

    def give_way(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` and detach when somebody else attaches to the model, instead of refusing that."""

        def leave() -> None:
            self.slot.give_way = None
            if self.is_attached:
                tell()
                self.detach()

        self.slot.give_way = leave
