"""Local SGD: ranks train alone, and average their parameters every few steps."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.averaging import Engine, LayoutCheck, checkpoint, gather_states, open_engine
from gradwire.buckets import Layouts, canonical_name
from gradwire.ddp import (
    Wire,
    attach,
    attachment_of,
    bucketed_parameters,
    claim_of,
    device_of,
    resolve_for_model,
    trained_parameters,
    unwrap,
)
from gradwire.errors import Place
from gradwire.ops import warm_up
from gradwire.peers import CollectiveCall, timeout_of
from gradwire.recipes import Recipe, agree_on_nodes, fingerprint, kernels_of, noop, require_fixed
from gradwire.recipes import recipe as parse_recipe
from gradwire.telemetry import WireStats
from gradwire.training.local_state import require_all_ranks, require_keys
from gradwire.training.outer import Outer
from gradwire.training.parameter_buckets import ParameterBucket, load_tensors, make_buckets, tensors_of


class LocalSGD:
    """Average gradients for ``warmup_steps`` steps; from then on average parameters every ``period`` steps.

    Ranks send how far their parameters have moved since the last averaging. So low-precision recipes encode
    small numbers, and an outer optimizer can use the mean as a gradient. After each averaging all ranks have
    the same parameters, bit for bit.

    Args:
        model: a ``DistributedDataParallel``, or ``torch.compile`` of one, with its weights loaded.
        optimizer: the local optimizer; those of its parameters that belong to the model are averaged.
        period: the number of steps between averagings.
        warmup_steps: the number of first steps that average gradients, as without local SGD.
        recipe: the recipe for parameters.
        gradient_recipe: the recipe for gradients during warm-up; by default ``recipe``.
        outer: the outer optimizer, `SlowMo` or `DiLoCo`; None to continue from the mean.
        timeout: how long to wait for the other ranks when recipes change; by default the group's timeout.

    Raises ValueError or TypeError for arguments that do not fit, or that differ between ranks.

    The constructor is collective, and so is every method except `state_dict` and `stats`. Call `step` after
    each step of the optimizer, also after one that a ``GradScaler`` has skipped::

        local = gradwire.LocalSGD(model, optimizer, period=16, recipe="bf16", outer=gradwire.DiLoCo())
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            local.step()
        local.average()  # whatever the period has left over
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        period: int,
        warmup_steps: int = 0,
        recipe: str | Recipe = "fp32",
        gradient_recipe: str | Recipe | None = None,
        outer: Outer | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._ddp = ddp = unwrap(model)
        self._optimizer = optimizer
        self._group: dist.ProcessGroup = ddp.process_group
        self._timeout = timeout or timeout_of(self._group)
        self._layouts = Layouts(ddp.module)
        with CollectiveCall(self._group, self._timeout, "gradwire.LocalSGD") as call:
            _check_counts(period, warmup_steps)
            self.period, self.warmup_steps, self.outer = period, warmup_steps, outer
            chosen = resolve_for_model(_parse_averaging(recipe), ddp)
            self._gradient_recipe = chosen if gradient_recipe is None else parse_recipe(gradient_recipe)
            self._parameters()
            warm_up(device_of(ddp), kernels_of(chosen, self._group))
            options = {"period": str(period), "warmup_steps": str(warmup_steps), "outer": repr(outer)}
            claim = {**options, **claim_of(ddp, fingerprint.of_recipe(chosen))}
            self.recipe = agree_on_nodes(chosen, call, claim)

        self._num_steps = self._num_averages = 0
        self._buckets: list[ParameterBucket] = []
        self._gradient_recipe_in_use = self._gradient_recipe_at(0)
        self._wire = self._attach()
        self._disabled = not self._wire.attached  # GRADWIRE_DISABLE is set
        with contextlib.ExitStack() as undo:
            undo.callback(self._wire.detach)
            if self._disabled:
                self._engine = Engine(noop(), None)
            else:
                self._engine = open_engine(
                    self.recipe, self._group, device_of(ddp), call.rendezvous, layout_check=LayoutCheck()
                )
                undo.callback(self._engine.close)
            if self.is_local:
                self._begin()
            undo.pop_all()

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return self._num_steps

    @property
    def is_local(self) -> bool:
        """True if the warm-up is over, so that gradients are not averaged any more."""
        return self._num_steps >= self.warmup_steps

    def step(self) -> bool:
        """Count a step, and average if it ends a period; return True if it does.

        Raises `WireError` if the averaging fails on any rank. Parameters are then as they were.
        """
        self._num_steps += 1
        num_local = self._num_steps - self.warmup_steps
        if num_local == 0:
            self._begin()
        if num_local <= 0 or num_local % self.period or self._disabled:
            return False
        self.average()
        return True

    def average(self) -> None:
        """Average parameters now, in the middle of a period: before an evaluation, or at the end.

        During warm-up this does nothing.
        """
        if not self._buckets:
            return
        self._check_parameters()
        futures = []
        for bucket in self._buckets:
            place = Place(self._group.rank(), self._num_steps, bucket.index, self._engine.name)
            futures.append(self._engine.start(bucket.pseudo_gradient(), place))
        means = [future.wait() for future in futures]
        if self._engine.failure is not None:
            raise self._engine.failure.with_traceback(None)
        for bucket, mean in zip(self._buckets, means, strict=True):
            lr = float(self._optimizer.param_groups[bucket.param_group].get("lr", 1.0))
            bucket.move(mean, lr)
        self._num_averages += 1

    def stats(self) -> WireStats:
        """Return bytes, messages and times of the averagings, each of which counts as a step."""
        return self._engine.stats.read(self._num_averages)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the step count, the parameters at the start of the period, the momentum and the residuals.

        The state is plain tensors and numbers. Residuals differ between ranks and have the rank in their key,
        so each rank saves its own state. With ``gather``, which is collective, every rank gets those of all
        ranks, and one rank can save them. Between two averagings the model's parameters differ between ranks
        too: call `average` first, or save every rank's.
        """
        rank, size = self._group.rank(), self._group.size()
        memory = self._engine.state.memory.state_dict()
        averaging = checkpoint.write(str(self.recipe), self._num_steps, (), memory, rank, size)
        if gather:
            averaging = gather_states(averaging, self._group, self._timeout, "LocalSGD.state_dict")
        wire = self._wire.state_dict(gather=gather)
        return {
            "num_steps": self._num_steps,
            **tensors_of(self._buckets),
            "averaging": averaging,
            "wire": wire,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; load the model's parameters separately.

        On another number of ranks, the residuals of all saved ranks are needed. Then ``state["averaging"]``
        and ``state["wire"]`` must each be `merge_state_dicts` of every rank's. A recipe without feedback has
        no residuals, and any rank's state will do.

        Raises ValueError, and loads nothing on any rank, if the state is not that of a LocalSGD, belongs to
        other parameters, lacks the residuals of a rank, or has another step than the other ranks'.
        """
        with CollectiveCall(self._group, self._timeout, "LocalSGD.load_state_dict") as call:
            num_steps, buckets, memory, of_wire = self._read(state)
            claim = {"the saved step": str(num_steps), "the wire's saved layout": str(of_wire.timeline)}
            claim["the wire's saved step"] = str(of_wire.step)
            call.agree({**claim, **claim_of(self._ddp, fingerprint.of_recipe(self.recipe))})
        self._attach_for(num_steps)
        self._wire.load_state_dict(state["wire"])
        self._num_steps, self._buckets = num_steps, buckets
        self._engine.state.memory.load_state_dict(memory, device_of(self._ddp))

    def detach(self) -> None:
        """Return the model to plain averaging of gradients, and end the lane; call it on every rank."""
        self._wire.detach()
        self._engine.close()

    def __enter__(self) -> LocalSGD:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _gradient_recipe_at(self, num_steps: int) -> Recipe:
        return noop() if num_steps >= self.warmup_steps else self._gradient_recipe

    def _attach_for(self, num_steps: int) -> None:
        """Attach the recipe for this step: the gradient recipe during warm-up, none after it."""
        if not self._disabled and self._gradient_recipe_in_use != self._gradient_recipe_at(num_steps):
            self._wire.detach()
            self._gradient_recipe_in_use = self._gradient_recipe_at(num_steps)
            self._wire = self._attach()

    def _attach(self) -> Wire:
        wire = attach(self._ddp, self._gradient_recipe_in_use, timeout=self._timeout)
        attachment_of(wire).slot.owner = "a gradwire.LocalSGD"
        return wire

    def _begin(self) -> None:
        """End the warm-up: from here on, ranks train alone."""
        self._attach_for(self._num_steps)
        if self._disabled:
            return
        self._buckets = make_buckets(self._parameters(), self._layouts, self.outer)
        for bucket in self._buckets:
            # All ranks must start from the same parameters; averaging keeps them the same from here on.
            dist.broadcast(bucket.start, group=self._group, group_src=0)
            bucket.write_parameters()

    def _parameters(self) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters to average, each with the number of its param group."""
        own = {id(parameter) for parameter in self._ddp.module.parameters()}
        found = [
            (parameter, number)
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in own and parameter.requires_grad
        ]
        if not found:
            raise ValueError(
                "the optimizer holds no parameter of the model: there is nothing to average; "
                "make it from the model's parameters"
            )
        return found

    def _check_parameters(self) -> None:
        now = [id(parameter) for parameter, _ in self._parameters()]
        if now != [id(parameter) for bucket in self._buckets for parameter in bucket.parameters]:
            raise ValueError(
                "the optimizer's parameters have changed since local SGD began; make a new LocalSGD after "
                "add_param_group or a change of requires_grad"
            )

    def _read(
        self, state: dict[str, Any]
    ) -> tuple[int, list[ParameterBucket], checkpoint.States, checkpoint.Saved]:
        """Return the step, the buckets, this rank's residuals, and the wire's state; ValueError if unfit."""
        num_steps = require_keys(state)
        is_local = num_steps >= self.warmup_steps and not self._disabled
        buckets = make_buckets(self._parameters(), self._layouts, self.outer) if is_local else []
        load_tensors(buckets, state)
        rank, size = self._group.rank(), self._group.size()
        for key in ("averaging", "wire"):
            require_all_ranks(key, state[key], size)
        named = {canonical_name(name): p for name, p in self._ddp.module.named_parameters()}
        memory = checkpoint.read(state["averaging"], named, (), rank, size, "mean").memory
        # The wire will check its state too, but by then a new wire may have replaced the old one.
        in_wire, must_be = bucketed_parameters(self._ddp), trained_parameters(self._ddp).keys()
        of_wire = checkpoint.read(state["wire"], in_wire, must_be, rank, size, "mean")
        return num_steps, buckets, memory, of_wire


def _check_counts(period: int, warmup_steps: int) -> None:
    if period < 1:
        raise ValueError(f"period must be at least 1, not {period}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, not {warmup_steps}")


def _parse_averaging(recipe: str | Recipe) -> Recipe:
    chosen = parse_recipe(recipe)
    require_fixed(chosen, "local SGD")
    if not chosen.exchange.communicates or chosen.reduction != "mean":
        raise ValueError(f"local SGD needs a recipe that averages, and {chosen} does not: choose another")
    return chosen
