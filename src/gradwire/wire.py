"""`attach` a recipe to a model; the `Wire` it returns is the handle to it."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.agreement import agree, next_meeting
from gradwire.bridge import Bridge
from gradwire.errors import WireError
from gradwire.execution import open_lane, timeout_of
from gradwire.guard import Guard
from gradwire.layout import BucketLayout, Layouts
from gradwire.mixed_precision import has_events
from gradwire.ops import warm_up
from gradwire.recipes import Recipe
from gradwire.recipes import recipe as parse_recipe
from gradwire.runners import HookRunner, RecipeRunner, Runner, hook_name
from gradwire.slot import Slot, divides_by_active, free_slot
from gradwire.stats import WireStats

log = logging.getLogger("gradwire")

Hook = Callable[..., Any]

# torch's hooks whose state is a process group.
_TORCH_GROUP_HOOKS = {
    f"torch.distributed.algorithms.ddp_comm_hooks.{name}_hooks" for name in ("default", "quantization")
}


class Wire:
    """What is attached to a model: look at it with `stats`, end it with `detach`."""

    def __init__(self, slot: Slot, bridge: Bridge | None, recipe: Recipe | Hook, layouts: Layouts) -> None:
        self._slot = slot
        self._bridge = bridge
        self._layouts = layouts
        self.recipe = recipe
        """The recipe, or the user's hook."""

    def stats(self) -> WireStats:
        """Bytes sent, messages, time waiting and working: in total, per step and per bucket."""
        if self._bridge is None:
            return WireStats(0, None, None, None, None, ())
        return self._bridge.runner.stats.read(self._bridge.num_steps)

    def layout(self) -> tuple[BucketLayout, ...]:
        """Which parameter lies where in each of the buckets seen so far."""
        return self._layouts.current()

    @property
    def model(self) -> DistributedDataParallel:
        """The model whose gradients this wire averages."""
        return self._slot.model

    def wrap_runner(self, wrap: Callable[[Runner], Runner]) -> None:
        """Put a runner around the one that averages; for rooms of gradwire's own."""
        assert self._bridge is not None
        self._bridge.runner = wrap(self._bridge.runner)

    @property
    def attached(self) -> bool:
        """Whether this wire still averages its model's gradients."""
        return self._bridge is not None and self._slot.bridge is self._bridge

    def detach(self) -> None:
        """Return the model to plain averaging, and end the lane.

        DDP takes one hook in its life, so ours stays registered and averages as DDP does without a hook.
        `attach` works again afterwards. Call it on every rank, between steps.
        """
        if self._bridge is not None:
            if self.attached:
                self._slot.bridge = None
            self._bridge.runner.close()

    @property
    def failure(self) -> WireError | None:
        """The first error of any rank, if there was one."""
        return None if self._bridge is None else self._bridge.runner.failure

    def is_on(self, model: DistributedDataParallel) -> bool:
        """Whether this is the model's wire."""
        return self._slot.is_of(model)

    def give_way(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` and detach when somebody else attaches to the model, instead of refusing that."""

        def leave() -> None:
            self._slot.give_way = None
            if self.attached:
                tell()
                self.detach()

        self._slot.give_way = leave

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        what = self.recipe if isinstance(self.recipe, Recipe) else hook_name(self.recipe)
        return f"<Wire {what!s}, {'attached' if self.attached else 'detached'}>"


def attach(
    model: nn.Module,
    recipe: str | Recipe | Hook = "fp32",
    *,
    state: object = None,
    timeout: timedelta | None = None,
) -> Wire:
    """Average the model's gradients by ``recipe`` from the next backward pass on.

    Collective: every rank of the model's process group calls it, with the same recipe.

    Args:
        model: a ``DistributedDataParallel``, or ``torch.compile`` of one.
        recipe: a name (``"bf16"``), a name with options (``"fp16:reduction=sum"``), a `Recipe`, or any
            DDP communication hook, in any form that can be called with ``(state, bucket)``.
        state: the first argument of a hook; not for recipes.
        timeout: how long to wait for the other ranks; by default the group's own timeout.

    Raises:
        TypeError: the model is not a ``DistributedDataParallel``, or the recipe is none.
        ValueError: there is no such recipe or option, the model is attached already or has another
            hook, or ranks attach different things.
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
    meeting = next_meeting(group)
    timeout = timeout or timeout_of(group)
    device = next(p.device for p in ddp.module.parameters() if p.requires_grad)
    disabled = os.environ.get("GRADWIRE_DISABLE", "0") not in ("", "0")
    try:
        slot, chosen, state = _prepare(ddp, recipe, state)
        if not disabled:
            warm_up(device)
    except Exception as error:
        agree(group, meeting, f"error: {error}", timeout)
        raise
    claim = repr(chosen) if isinstance(chosen, Recipe) else f"hook {hook_name(chosen)}"
    agree(group, meeting, "GRADWIRE_DISABLE is set" if disabled else claim, timeout)
    layouts = Layouts(ddp.module)
    if disabled:
        log.warning("GRADWIRE_DISABLE is set: %s is not attached, DDP averages as it is", chosen)
        return Wire(slot, None, chosen, layouts)
    runner: Runner
    if isinstance(chosen, Recipe):
        lane = open_lane(group, device, meeting) if chosen.exchange.communicates else None
        # Nothing behind the model's hook may hold the model.
        by_active = functools.partial(divides_by_active, weakref.ref(ddp))
        may_skip = ddp.find_unused_parameters or ddp.static_graph
        runner = RecipeRunner(chosen, lane, layouts, by_active, may_skip=may_skip)
    else:
        # On CUDA a hook's future is completed as soon as its work is enqueued: nothing waits for it.
        runner = HookRunner(chosen, state, Guard(group, meeting) if device.type == "cpu" else None)
    bridge = Bridge(runner, group.rank())
    slot.take(bridge)
    return Wire(slot, bridge, chosen, layouts)


def unwrap(model: nn.Module) -> DistributedDataParallel:
    """The ``DistributedDataParallel`` that ``model`` is or compiles; TypeError if it is none."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile(ddp)
    if isinstance(inner, DistributedDataParallel):
        return inner
    hint = ""
    if isinstance(getattr(inner, "module", None), DistributedDataParallel):
        hint = "; its .module is one: attach to that"
    elif isinstance(inner, nn.Module):
        hint = "; wrap the model first"
    raise TypeError(f"gradwire takes a DistributedDataParallel, not {type(inner).__name__}{hint}")


def _prepare(
    ddp: DistributedDataParallel, recipe: str | Recipe | Hook, state: object
) -> tuple[Slot, Recipe | Hook, object]:
    """Check all that this rank can check alone."""
    chosen: Recipe | Hook
    if isinstance(recipe, str | Recipe) or not callable(recipe):
        chosen = parse_recipe(recipe)
    else:
        chosen = getattr(recipe, "gradwire_recipe", recipe)
    if isinstance(state, dist.ProcessGroup) and state is not ddp.process_group:
        raise ValueError(
            "the state is a process group, but not the model's own; gradients of a model are averaged "
            "over the group its DistributedDataParallel was made with: leave state out"
        )
    if isinstance(chosen, Recipe):
        chosen = chosen.placed(_local_size(ddp.process_group))
        if ddp.process_group.size() % (chosen.local_size or 1):
            raise ValueError(
                f"recipe {chosen}: {ddp.process_group.size()} ranks cannot be nodes of {chosen.local_size}"
            )
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
    if hasattr(state, "gradwire_bind"):
        state.gradwire_bind(ddp)
    if hasattr(chosen, "gradwire_prepare"):
        chosen.gradwire_prepare(ddp)
    elif any(hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters()):
        raise ValueError(
            "this model's parameters have optimizers that run in backward, on gradients that are not yet "
            "averaged; leave _apply_optimizer_in_backward out and use gradwire.overlap_optimizer"
        )
    if ddp.mixed_precision is not None and not has_events():
        raise ValueError(
            "this model was made with mixed_precision=, whose forward pass needs an accelerator's events; "
            "on CPU leave it out and use torch.autocast"
        )
    return free_slot(ddp), chosen, state


def _local_size(group: dist.ProcessGroup) -> int:
    """How many ranks a node has, if the launcher says so and all ranks of the world are in the group."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or "1"
    size, world_size = int(said), group.size()
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", world_size // size))
    is_even = num_nodes > 1 and size * num_nodes == world_size == dist.get_world_size()
    # Ranks of a node must be neighbours.
    is_in_place = int(os.environ.get("LOCAL_RANK", group.rank() % size)) == group.rank() % size
    return size if is_even and is_in_place else 1


def _takes_group(hook: Hook) -> bool:
    """Whether the hook is one of ours or torch's whose state is a process group, wrapped or not."""
    while isinstance(hook, functools.partial) or hasattr(hook, "gradwire_wraps"):
        hook = hook.func if isinstance(hook, functools.partial) else hook.gradwire_wraps
    return hasattr(hook, "gradwire_recipe") or getattr(hook, "__module__", "") in _TORCH_GROUP_HOOKS
