"""`attach`: a recipe, or a hook, and a model become a `Wire`."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from datetime import timedelta
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from gradwire.averaging import RecipeRunner, Runner
from gradwire.buckets import Layouts
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_info import hook_info
from gradwire.ddp.hook_slot import divides_by_active, free_slot
from gradwire.ddp.hook_watchdog import HookWatchdog
from gradwire.ddp.mixed_precision import has_events
from gradwire.ddp.models import claim_of, device_of, num_transient, resolve_for_model, unwrap
from gradwire.ddp.nonfinite import NonfinitePolicy, OnNonfinite
from gradwire.ddp.options import Options
from gradwire.ddp.user_hooks import HookRunner, hook_name
from gradwire.ddp.verification import Verification
from gradwire.ddp.wire import Hook, Wire
from gradwire.lanes import open_lane
from gradwire.ops import warm_up
from gradwire.peers import NcclGroup, agree, backend_name, join_rendezvous, timeout_of
from gradwire.recipes import Recipe, agree_on_nodes, is_factory, kernels_of
from gradwire.recipes import recipe as parse_recipe
from gradwire.telemetry import Meter, Recorder, Telemetry

log = logging.getLogger("gradwire")

_TORCH_HOME = "torch.distributed.algorithms.ddp_comm_hooks."
# torch's hooks whose state is a process group.
_TORCH_GROUP_HOOKS = {f"{_TORCH_HOME}{name}_hooks" for name in ("default", "quantization")}
# Where states are from that may have one.
_HOMES = (_TORCH_HOME, "gradwire.ddp_comm_hooks.")


class _ForGroup(Protocol):
    process_group: dist.ProcessGroup | None


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
    """Average the model's gradients by ``recipe`` from the next backward pass on.

    Collective: every rank of the model's process group calls it, with the same recipe.

    Args:
        model: a ``DistributedDataParallel``, or ``torch.compile`` of one.
        recipe: a name (``"bf16"``), a name with options (``"fp16:reduction=sum"``), a `Recipe`, or any
            DDP communication hook, in any form that can be called with ``(state, bucket)``.
        state: the first argument of a hook; not for recipes.
        timeout: how long to wait for the other ranks; by default the group's own timeout.
        on_nonfinite: what to do when an averaged gradient is infinite or NaN: ``"propagate"`` it to every
            rank, as DDP does; ``"skip"`` the step, that is set every ``.grad`` to None on every rank, so
            that no optimizer moves, and count it in `Wire.stats`; or ``"raise"`` FloatingPointError from
            ``backward()`` on every rank, on CUDA from the next one.
        verify_every: every so many steps compare the averaged gradients over the ranks, bit for bit, and
            raise `WireError` from ``backward()`` on every rank if they differ, with the step, the ranks and
            the first parameter; 0, the default, for never. On CUDA such a step waits for the device. Not
            done inside ``join()`` of a model with ``find_unused_parameters``.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss, if there is one. What a recipe holds
            back is in units of the scaled loss, and follows each change of its scale.
        telemetry: what to record while the wire runs, see `Telemetry`; by default nothing.

    Raises:
        TypeError: the model is not a ``DistributedDataParallel``, the recipe is none, or another argument
            is not what it should be.
        ValueError: there is no such recipe or option, the model is attached already or has another
            hook, or ranks differ in gradwire's version, the recipe, the options or the parameters; the
            text says which rank in what.
        OSError: the file of ``telemetry`` cannot be written.
        RuntimeError: a rank did not attach in time.

    The environment variable ``GRADWIRE_DISABLE=1`` makes it leave the model to DDP's own averaging.

    Example::

        model = DistributedDataParallel(net)
        wire = gradwire.attach(model, "bf16")
        ...  # train as before
        print(wire.stats())
    """
    ddp = unwrap(model)
    group = ddp.process_group
    disabled = os.environ.get("GRADWIRE_DISABLE", "0") not in ("", "0")
    limit = timeout if isinstance(timeout, timedelta) else timeout_of(group)
    meeting = join_rendezvous(group, limit)
    try:
        if not isinstance(timeout, timedelta | None):
            raise TypeError(f"timeout must be a datetime.timedelta, not {timeout!r}")
        device = device_of(ddp)
        options = Options(on_nonfinite, verify_every, grad_scaler, telemetry)
        chosen, state = _choose(ddp, recipe, state)
        options.check(chosen, device, is_nccl=_is_nccl(group, device))
        slot = free_slot(ddp)
        if telemetry is not None and not disabled:
            telemetry.check_file(group.rank())
        if isinstance(chosen, Recipe) and not disabled:
            warm_up(device, kernels_of(chosen, group))
    except Exception as error:
        agree(group, meeting, error, limit)
        raise
    claim = {
        "GRADWIRE_DISABLE": "set" if disabled else "not set",
        **options.claim(),
        **claim_of(ddp, chosen),
    }
    if isinstance(chosen, Recipe):
        chosen = agree_on_nodes(chosen, group, meeting, claim, limit)
    else:
        agree(group, meeting, claim, limit)
    layouts = Layouts(ddp.module)
    if disabled:
        name = chosen if isinstance(chosen, Recipe) else hook_name(chosen)
        log.warning("GRADWIRE_DISABLE is set: %s is not attached, DDP averages as it is", name)
        return Wire(slot, None, chosen, layouts, limit)
    meter = options.meter()
    with contextlib.ExitStack() as undo:
        runner = _open_runner(ddp, chosen, state, meeting, layouts, options, meter)
        undo.callback(runner.close)
        recorder = None
        if telemetry is not None:
            file = telemetry.open_file(group.rank())
            recorder = Recorder(telemetry, group.rank(), layouts, meter, file)
            undo.callback(recorder.close)
        policy = None if on_nonfinite == "propagate" else NonfinitePolicy(on_nonfinite, ddp)
        verification = Verification(verify_every, ddp) if verify_every else None
        bridge = Bridge(runner, group.rank(), policy, verification, recorder)
        slot.take(bridge)
        undo.callback(slot.leave, bridge)
        # What cannot be undone comes last.
        _bind(ddp, chosen, state)
        undo.pop_all()
    if recorder is not None:
        recorder.tell("attach", 0, recipe=runner.name, world_size=group.size(), device=str(device))
    return Wire(slot, bridge, chosen, layouts, limit)


def _is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    return device.type == "cuda" and backend_name(group, device) == "nccl"


def _choose(
    ddp: DistributedDataParallel, recipe: str | Recipe | Hook, state: object
) -> tuple[Recipe | Hook, object]:
    """What to attach and its state; raises for all that this rank can see alone, and changes nothing."""
    chosen: Recipe | Hook
    # What makes recipes, and any class, can be called as well, but returns no future.
    if isinstance(recipe, str | Recipe | type) or not callable(recipe) or is_factory(recipe):
        chosen = parse_recipe(recipe)  # type: ignore[arg-type]
    else:
        chosen = hook_info(recipe).recipe or recipe
    if isinstance(state, dist.ProcessGroup) and state is not ddp.process_group:
        raise ValueError(
            "the state is a process group, but not the model's own; gradients of a model are averaged "
            "over the group its DistributedDataParallel was made with: leave state out"
        )
    if isinstance(chosen, Recipe):
        chosen = resolve_for_model(chosen, ddp)
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise TypeError(f"recipe {chosen} takes no state; state= goes with a hook of your own")
    elif state is None and _takes_group(chosen):
        # They would take None for the world, whatever the model's group is.
        state = ddp.process_group
    if ddp._use_python_reducer:
        raise ValueError(
            "this model uses DDP's Python reducer (torch._dynamo.config.optimize_ddp = "
            "'python_reducer'), which passes hooks no buckets; set optimize_ddp to True or False"
        )
    if _is_for_a_group(state) and state.process_group not in (None, ddp.process_group):
        raise ValueError(
            f"this {type(state).__name__} has a process group that is not the model's own; make it with "
            "process_group=None"
        )
    if hook_info(chosen).prepare is None and any(
        hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters()
    ):
        raise ValueError(
            "this model's parameters have optimizers that run in backward, on gradients that are not yet "
            "averaged; leave _apply_optimizer_in_backward out and use gradwire.overlap_optimizer"
        )
    if ddp.mixed_precision is not None and not has_events():
        raise ValueError(
            "this model was made with mixed_precision=, whose forward pass needs an accelerator's events; "
            "on CPU leave it out and use torch.autocast"
        )
    return chosen, state


def _open_runner(
    ddp: DistributedDataParallel,
    chosen: Recipe | Hook,
    state: object,
    meeting: str,
    layouts: Layouts,
    options: Options,
    meter: Meter | None,
) -> Runner:
    """What averages the model's buckets; collective."""
    group, device = ddp.process_group, device_of(ddp)
    if not isinstance(chosen, Recipe):
        # On CUDA a hook's future is completed as soon as its work is enqueued: nothing waits for it.
        guard = HookWatchdog(group, meeting) if device.type == "cpu" else None
        peers = NcclGroup(group) if _is_nccl(group, device) else None
        return HookRunner(chosen, state, guard, layouts, peers)
    return RecipeRunner(
        chosen,
        open_lane(group, device, meeting) if chosen.exchange.communicates else None,
        layouts,
        # Nothing behind the model's hook may hold the model.
        functools.partial(divides_by_active, weakref.ref(ddp)),
        may_skip=ddp.find_unused_parameters or ddp.static_graph,
        num_transient=num_transient(ddp),
        loss_scale=options.loss_scale(),
        meter=meter,
        may_wait=ddp.mixed_precision is None,  # whose own hook waits for each bucket
    )


def _bind(ddp: DistributedDataParallel, chosen: Recipe | Hook, state: object) -> None:
    """Tell the hook and its state, ours or torch's, which model and which process group they are for."""
    if _is_for_a_group(state):
        # Without one, its hook would take the world, whatever the model's group is.
        state.process_group = ddp.process_group
    if _is_known(state) and hasattr(state, "gradwire_bind"):
        state.gradwire_bind(ddp)
    if (prepare := hook_info(chosen).prepare) is not None:
        prepare(ddp)


def _is_for_a_group(state: Any) -> TypeGuard[_ForGroup]:
    """Whether this is a state of ours or torch's that has a process group."""
    return _is_known(state) and hasattr(state, "process_group")


def _is_known(state: object) -> bool:
    """Whether its class is ours or torch's, or made from one of these."""
    return any(kind.__module__.startswith(_HOMES) for kind in type(state).__mro__)


def _takes_group(hook: Hook) -> bool:
    """Whether the hook is one of ours or torch's whose state is a process group, wrapped or not."""
    while (inner := hook.func if isinstance(hook, functools.partial) else hook_info(hook).wraps) is not None:
        hook = inner
    return hook_info(hook).recipe is not None or getattr(hook, "__module__", "") in _TORCH_GROUP_HOOKS
