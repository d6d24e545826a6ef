"""`attach` a recipe to a model; the `Wire` it returns is the handle to it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire.agreement import agree, next_meeting
from gradwire.bridge import Bridge, HookRunner, RecipeRunner, Runner, hook_name
from gradwire.execution import open_lane, timeout_of
from gradwire.guard import Guard
from gradwire.layout import BucketLayout, Layouts
from gradwire.ops import warm_up
from gradwire.recipes import Recipe
from gradwire.recipes import recipe as parse_recipe
from gradwire.stats import WireStats

log = logging.getLogger("gradwire")

Hook = Callable[..., Any]


class Wire:
    """What is attached to a model: look at it with `stats`, end it with `detach`."""

    def __init__(self, slot: _Slot, bridge: Bridge | None, recipe: Recipe | Hook, layouts: Layouts) -> None:
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
    ddp = _unwrap(model)
    group = ddp.process_group
    meeting = next_meeting(group)
    timeout = timeout or timeout_of(group)
    try:
        slot, chosen, state = _prepare(ddp, recipe, state)
    except Exception as error:
        agree(group, meeting, f"error: {error}", timeout)
        raise
    disabled = os.environ.get("GRADWIRE_DISABLE", "0") not in ("", "0")
    claim = repr(chosen) if isinstance(chosen, Recipe) else f"hook {hook_name(chosen)}"
    agree(group, meeting, "GRADWIRE_DISABLE is set" if disabled else claim, timeout)
    layouts = Layouts(ddp.module)
    if disabled:
        log.warning("GRADWIRE_DISABLE is set: %s is not attached, DDP averages as it is", chosen)
        return Wire(slot, None, chosen, layouts)
    runner = _runner(ddp, chosen, state, meeting, layouts)
    bridge = Bridge(runner, group.rank())
    slot.take(ddp, bridge)
    return Wire(slot, bridge, chosen, layouts)


class _Slot:
    """A model's one hook slot: the closure DDP holds, with whatever is attached behind it now."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.bridge: Bridge | None = None
        self._group = group
        self._registered = False

    def take(self, ddp: DistributedDataParallel, bridge: Bridge) -> None:
        """Put ``bridge`` behind the closure, and register that if it is not yet."""
        if not self._registered:
            # No annotations, and a parameter called `bucket`: DDP inspects both.
            def gradwire_hook(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
                return self._run(bucket)

            ddp.register_comm_hook(None, gradwire_hook)
            # DDP keeps a second reference for its Python reducer alone, which would end in copies and
            # pickles of the model.
            ddp._comm_hooks.clear()
            self._registered = True
        self.bridge = bridge

    def _run(self, bucket: GradBucket) -> Future[Tensor]:
        if self.bridge is not None:
            return self.bridge.run(bucket)
        flat = bucket.buffer().div_(self._group.size())
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future


_slots: weakref.WeakKeyDictionary[DistributedDataParallel, _Slot] = weakref.WeakKeyDictionary()


def _unwrap(model: nn.Module) -> DistributedDataParallel:
    inner = getattr(model, "_orig_mod", model)  # torch.compile(ddp)
    if isinstance(inner, DistributedDataParallel):
        return inner
    hint = ""
    if isinstance(getattr(inner, "module", None), DistributedDataParallel):
        hint = "; its .module is one: attach to that"
    elif isinstance(inner, nn.Module):
        hint = "; wrap the model first"
    raise TypeError(f"gradwire.attach takes a DistributedDataParallel, not {type(inner).__name__}{hint}")


def _prepare(
    ddp: DistributedDataParallel, recipe: str | Recipe | Hook, state: object
) -> tuple[_Slot, Recipe | Hook, object]:
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
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise TypeError(f"recipe {chosen} takes no state; state= goes with a hook of your own")
    elif state is None and hook_name(chosen).startswith("torch.distributed.algorithms."):
        # torch's hooks would take None for the world, whatever the model's group is.
        state = ddp.process_group
    if ddp._use_python_reducer:
        raise ValueError(
            "this model uses DDP's Python reducer (torch._dynamo.config.optimize_ddp = "
            "'python_reducer'), which passes hooks no buckets; set optimize_ddp to True or False"
        )
    if ddp.mixed_precision is not None:
        raise ValueError(
            "this model was made with mixed_precision=, which takes DDP's only hook slot for itself; "
            "leave mixed_precision out and use torch.autocast"
        )
    slot = _slots.get(ddp)
    if slot is None:
        if ddp._comm_hooks:
            raise ValueError(
                f"the model has a hook already, {hook_name(ddp._comm_hooks[0][0])}, and DDP takes one in "
                "its life; register that hook through gradwire.attach(model, hook, state=...) instead"
            )
        slot = _slots[ddp] = _Slot(ddp.process_group)
    if slot.bridge is not None:
        raise ValueError(
            f"{slot.bridge.runner.name} is attached to this model already; call detach() on its wire first"
        )
    return slot, chosen, state


def _runner(
    ddp: DistributedDataParallel,
    chosen: Recipe | Hook,
    state: object,
    meeting: str,
    layouts: Layouts,
) -> Runner:
    group = ddp.process_group
    device = next(p.device for p in ddp.module.parameters() if p.requires_grad)
    warm_up(device)
    if isinstance(chosen, Recipe):
        model = weakref.ref(ddp)

        def divide_by_active() -> bool:
            ddp = model()
            return ddp is not None and ddp._join_config.enable and not ddp._divide_by_initial_world_size

        return RecipeRunner(chosen, open_lane(group, device, meeting), layouts, divide_by_active)
    # On CUDA a hook's future is completed as soon as its work is enqueued: nothing waits for it.
    return HookRunner(chosen, state, Guard(group, meeting) if device.type == "cpu" else None)
