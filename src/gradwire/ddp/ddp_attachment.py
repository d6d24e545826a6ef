"""The parts behind a `Wire` on a DDP model: its slot, the bridge in it, and the choice of recipe or hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.averaging import Engine, NativeMean, Tuned, checkpoint
from gradwire.buckets import BucketLayout, Layouts
from gradwire.ddp.attachment import Attachment
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.choice import Choice
from gradwire.ddp.hook_slot import HookSlot
from gradwire.ddp.models import (
    bucketed_parameters,
    claim_of,
    device_of,
    may_exchange_after_backward,
    resolve_for_model,
    trained_parameters,
)
from gradwire.ddp.runner import Runner
from gradwire.peers import uses_nccl
from gradwire.recipes import Recipe, Tuning, WirePlan, make_plan


class DDPAttachment(Attachment):
    """The parts that one `attach` to a DDP model has put together; internal to gradwire.

    With ``GRADWIRE_DISABLE`` the bridge is not in the slot.
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
        self._bridge = bridge
        self.layouts = layouts
        super().__init__(bridge, choice, group.rank(), group.size(), timeout, is_disabled=is_disabled)

    @property
    def model(self) -> DistributedDataParallel:
        return self.slot.model

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        return self.model.process_group if group is None else group

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def is_attached(self) -> bool:
        return self.slot.bridge is self._bridge

    def resolve(self, recipe: Recipe) -> Recipe:
        return resolve_for_model(recipe, self.model)

    def claim(self, chosen: dict[str, str]) -> dict[str, str]:
        return claim_of(self.model, chosen)

    def seen_layouts(self) -> tuple[BucketLayout, ...]:
        return self.layouts.current()

    def plan(self, recipe: Recipe, step: int | None) -> WirePlan:
        trained: list[Tensor] = list(trained_parameters(self.model).values())
        buckets = self.layouts.current() or self.layouts.one_per_dtype(trained)
        return make_plan(recipe, buckets, self.group.rank(), self.group.size(), step)

    def make_tuner(self, tuning: Tuning, engine: Engine, **options: Any) -> Tuned:
        model = weakref.ref(self.slot.model)  # weakly: the model's hook holds this

        def may_look() -> bool:
            ddp = model()
            return ddp is not None and may_exchange_after_backward(ddp)

        # On NCCL, an engine does the same with exact gradients, on a stream of its own.
        native = None if uses_nccl(self.group, self.device) else NativeMean(self.group)
        return super().make_tuner(tuning, engine, may_look=may_look, native=native, **options)

    def read(self, state: Mapping[str, Any]) -> checkpoint.Saved:
        recipe = self.choice.recipe
        seen = {slot.name for layout in self.layouts.current() for slot in layout.slots}
        may_be = {n: p for n, p in bucketed_parameters(self.model).items() if not seen or n in seen}
        must_be = seen or trained_parameters(self.model).keys()
        reduction = "mean" if recipe is None else recipe.reduction
        return checkpoint.read(state, may_be, must_be, self.rank, self.grid, reduction)

    def leave(self) -> None:
        self.slot.leave(self._bridge)

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
