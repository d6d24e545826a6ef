"""`attach`, which makes a `Wire` from a model and a recipe or hook."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from gradwire.averaging import (
    Engine,
    LayoutCheck,
    RunState,
    Timeline,
    disabling_claim,
    is_disabled,
    open_engine,
)
from gradwire.buckets import Layouts
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.bucket_size import suggest_buckets
from gradwire.ddp.choice import Choice, choose
from gradwire.ddp.ddp_attachment import DDPAttachment
from gradwire.ddp.double_momentum import watch_for_momentum
from gradwire.ddp.gradients import DDPGradients
from gradwire.ddp.hook_guard import NoWatchdog
from gradwire.ddp.hook_info import Hook
from gradwire.ddp.hook_slot import HookSlot, divides_by_active, free_slot
from gradwire.ddp.hook_watchdog import HookWatchdog
from gradwire.ddp.models import (
    claim_of,
    device_of,
    num_bucketed,
    num_transient,
    num_unfrozen,
    require_single,
    unwrap,
)
from gradwire.ddp.nonfinite import OnNonfinite
from gradwire.ddp.optimizer_steps import WatchedModel
from gradwire.ddp.options import Options
from gradwire.ddp.runner import Runner
from gradwire.ddp.unaveraged import watch_for_steps
from gradwire.ddp.untold_scaler import watch_for_scaler
from gradwire.ddp.user_hooks import HookRunner
from gradwire.ddp.wire import Wire
from gradwire.ops import warm_up
from gradwire.peers import (
    CollectiveCall,
    NcclGroup,
    own_world_rank,
    require_timeout,
    timeout_or_own,
    uses_nccl,
)
from gradwire.recipes import Recipe, agree_on_nodes, kernels_of, noop
from gradwire.telemetry import Meter, Telemetry

log = logging.getLogger("gradwire")


def attach(
    model: nn.Module,
    recipe: str | Recipe | Hook = "fp32",
    *,
    state: object = None,
    timeout: timedelta | None = None,
    on_nonfinite: OnNonfinite = "propagate",
    verify_every: int = 0,
    grad_scaler: GradScaler | None = None,
    telemetry: Telemetry | None = None,
) -> Wire:
    """Average the gradients of a ``DistributedDataParallel`` by ``recipe``; see `gradwire.attach`."""
    ddp = unwrap(model)
    group = ddp.process_group
    limit = timeout_or_own(timeout, group)
    with CollectiveCall(group, limit, "gradwire.attach") as call:
        require_timeout(timeout)
        require_single(ddp)
        device = device_of(ddp)
        options = Options(on_nonfinite, verify_every, grad_scaler, telemetry)
        choice = choose(ddp, recipe, state)
        options.check(choice.recipe_or_hook, device, is_nccl=uses_nccl(group, device))
        slot = free_slot(ddp)
        if not is_disabled():
            options.check_file(own_world_rank(group), is_first=group.rank() == 0)
            if choice.recipe is not None:
                warm_up(device, kernels_of(choice.recipe, group))
        claim = {
            **disabling_claim(),
            **options.claim(),
            **claim_of(ddp, choice.fingerprint),
        }
        if choice.recipe is not None:
            choice = choice.with_recipe(agree_on_nodes(choice.recipe, call, claim))
        else:
            call.agree(claim)
    layouts = Layouts(ddp.module)
    if is_disabled():
        log.warning("GRADWIRE_DISABLE is set: %s is not attached, and DDP averages as usual", choice.name)
        bridge = Bridge(Engine(noop(), None), layouts, own_world_rank(group))
        return Wire(DDPAttachment(slot, bridge, choice, layouts, limit, is_disabled=True))
    bridge = _open_bridge(ddp, slot, choice, options, layouts, call.rendezvous)
    details = {"recipe": bridge.runner.name, "world_size": group.size(), "device": str(device)}
    bridge.checks.record_event("attach", 0, **details)
    if choice.recipe is not None:
        suggest_buckets(ddp, choice.recipe)
    if choice.communicates:
        if group.rank() == 0 and (num := num_unfrozen(ddp)):
            log.warning(
                "%d trained parameter(s) were frozen when DistributedDataParallel was made: neither DDP nor "
                "gradwire averages their gradients, and ranks drift apart. Make it anew, then attach",
                num,
            )
        watch_for_steps(ddp, slot, bridge, layouts)
        watch_for_momentum(ddp, slot, bridge, choice.recipe)
    if choice.recipe is not None:
        watch_for_scaler(WatchedModel(ddp, slot, bridge), options.grad_scaler)
    return Wire(DDPAttachment(slot, bridge, choice, layouts, limit))


def _open_bridge(
    ddp: DistributedDataParallel,
    slot: HookSlot,
    choice: Choice,
    options: Options,
    layouts: Layouts,
    rendezvous: str,
) -> Bridge:
    """Open what averages the model's buckets and put it into the slot; collective. Undo all if it fails."""
    group, meter = ddp.process_group, options.meter()
    rank = own_world_rank(group)
    with contextlib.ExitStack() as undo:
        runner = _open_runner(ddp, choice, options, meter, rendezvous)
        undo.callback(runner.close)
        gradients = DDPGradients(weakref.ref(ddp))
        checks = options.checks(
            gradients,
            rank,
            layouts,
            meter,
            is_first=group.rank() == 0,
            may_compare=gradients.may_compare,
        )
        undo.callback(checks.close)
        # Weakly: the model's hook holds this, and must not hold the model.
        by_active = functools.partial(divides_by_active, weakref.ref(ddp))
        bridge = Bridge(runner, layouts, rank, checks, by_active, num_bucketed(ddp))
        slot.take(bridge)
        undo.callback(slot.leave, bridge)
        # Binding comes last, since it cannot be undone.
        choice.bind(ddp)
        undo.pop_all()
    return bridge


def _open_runner(
    ddp: DistributedDataParallel, choice: Choice, options: Options, meter: Meter | None, rendezvous: str
) -> Runner:
    """Open the runner that averages the model's buckets; collective."""
    group, device = ddp.process_group, device_of(ddp)
    if not isinstance(choice.recipe_or_hook, Recipe):
        return _open_hook_runner(choice.recipe_or_hook, choice.state, group, device, rendezvous)
    return open_engine(
        choice.recipe_or_hook,
        group,
        device,
        rendezvous,
        RunState(timeline=Timeline(num_transient(ddp)), loss_scale=options.loss_scale()),
        may_wait=ddp.mixed_precision is None,  # with mixed precision, DDP's own hook waits for each bucket
        in_steps=True,
        meter=meter,
        layout_check=LayoutCheck(),
        may_have_unused=ddp.find_unused_parameters or ddp.static_graph,
    )


def _open_hook_runner(
    hook: Hook, state: object, group: dist.ProcessGroup, device: torch.device, rendezvous: str
) -> HookRunner:
    """Open the runner of a user's hook, with the guard that its device and group need; collective."""
    if uses_nccl(group, device):
        # A hook's future completes as soon as its work is enqueued, so no watchdog is needed.
        return HookRunner(hook, state, NoWatchdog(NcclGroup(group)), LayoutCheck())
    if device.type in ("cpu", "cuda"):
        # Gloo's futures complete when other ranks have answered, those of CUDA tensors too.
        return HookRunner(hook, state, HookWatchdog(group, rendezvous), LayoutCheck())
    return HookRunner(hook, state)
