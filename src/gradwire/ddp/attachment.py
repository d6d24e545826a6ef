"""The interface between a `Wire` and the model that it is attached to."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from gradwire.averaging import Engine, Grid, RunState, Tuned, checkpoint, gather_states
from gradwire.buckets import BucketLayout
from gradwire.ddp.choice import Choice
from gradwire.ddp.runner import Runner
from gradwire.ddp.step_checks import StepChecks
from gradwire.errors import WireError
from gradwire.peers import CollectiveCall, GridCall, own_world_rank
from gradwire.recipes import Recipe, Tuning, WirePlan
from gradwire.torch_private import backward_pass
from gradwire.tuning import Decision


class StepSource(Protocol):
    """The way of a model's gradients to a runner; it counts steps."""

    runner: Runner
    checks: StepChecks
    tuned: Tuned | None
    """The tuner of recipe ``auto``; None for other recipes and for hooks."""
    num_steps: int
    """The number of steps of the run, including those before a resume."""


class Attachment(abc.ABC):
    """The parts that one `attach` has put together; internal to gradwire.

    With ``GRADWIRE_DISABLE``, its engine averages nothing.
    """

    def __init__(
        self,
        bridge: StepSource,
        choice: Choice,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *,
        num_shards: int = 1,
        is_disabled: bool = False,
    ) -> None:
        self.bridge = bridge
        self.choice = choice
        self.rank, self.world_size = rank, world_size
        """This rank and the number of ranks, as states count them."""
        self.grid = Grid(world_size, num_shards)
        self._name = own_world_rank(self.group)
        self.is_disabled = is_disabled
        # Kept here, since another runner may be put around it.
        self.engine = bridge.runner if isinstance(bridge.runner, Engine) else None
        self.timeout = timeout
        self._has_ended = False
        self._ended_with: WireError | None = None
        if choice.recipe is not None:
            self.use_tuner_of(choice.recipe)

    @property
    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The model whose gradients are averaged; RuntimeError if it exists no more."""

    @property
    @abc.abstractmethod
    def group(self) -> dist.ProcessGroup:
        """The ranks that exchange messages; RuntimeError if the group exists no more."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device of the gradients."""

    @property
    @abc.abstractmethod
    def is_attached(self) -> bool:
        """True while this attachment averages the model's gradients."""

    @abc.abstractmethod
    def resolve(self, recipe: Recipe) -> Recipe:
        """Return ``recipe`` resolved for this model's parameters; ValueError if it does not fit the model."""

    @abc.abstractmethod
    def claim(self, chosen: dict[str, str]) -> dict[str, str]:
        """Return the facts that must be equal on all ranks: the ``chosen`` ones, and those of the model."""

    @abc.abstractmethod
    def seen_layouts(self) -> tuple[BucketLayout, ...]:
        """Return the layouts of the buckets seen so far."""

    @abc.abstractmethod
    def plan(self, recipe: Recipe, step: int | None) -> WirePlan:
        """Return what this rank sends in a step."""

    @abc.abstractmethod
    def read(self, state: Mapping[str, Any]) -> checkpoint.Saved:
        """Check a state against the model and return it; ValueError says what does not fit."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Return the model to its own averaging."""

    @property
    def failure(self) -> WireError | None:
        """The first error of any rank, if there was one."""
        return self.bridge.runner.failure

    @property
    def first_failure(self) -> WireError | None:
        """The first error of any rank while this was attached, if there was one."""
        return self._ended_with if self._has_ended else self.failure

    @property
    def state(self) -> RunState:
        """The state that a checkpoint holds; empty for a hook, which keeps its own."""
        return RunState() if self.engine is None else self.engine.state

    @property
    def tuned(self) -> Tuned | None:
        """The tuner of recipe ``auto``; None for other recipes."""
        return self.bridge.tuned

    @property
    def current_recipe(self) -> Recipe | None:
        """The recipe, with the encodings that ``auto`` has chosen by now; None for a hook."""
        if self.tuned is None or self.engine is None:
            return self.choice.recipe
        return self.engine.recipe

    def use_tuner_of(self, recipe: Recipe) -> None:
        """Let the recipe choose its encodings, if it is ``auto``; end the tuner of an earlier recipe."""
        self.bridge.tuned = None
        if recipe.tuning is not None and self.engine is not None and not self.is_disabled:
            self.bridge.tuned = self.make_tuner(recipe.tuning, self.engine)

    def make_tuner(self, tuning: Tuning, engine: Engine, **options: Any) -> Tuned:
        """Return a tuner of the engine, over the ranks that exchange messages."""
        size, step = self.group.size(), self.bridge.num_steps
        return Tuned(tuning, engine, self.rank, size, step, on_decision=self._record_decision, **options)

    def _record_decision(self, decision: Decision) -> None:
        fields = {**dataclasses.asdict(decision), "event": "decision"}
        self.bridge.checks.record_event(**fields)

    @property
    def checks_nonfinite(self) -> bool:
        """True if ``on_nonfinite`` is ``"skip"`` or ``"raise"``."""
        return self.bridge.checks.policy is not None

    def call(self, method: str) -> CollectiveCall:
        """Return a collective call of ``method`` by all of the model's ranks; RuntimeError after `detach`."""
        if not (self.is_attached or self.is_disabled):
            what = method.rpartition(".")[2]
            raise RuntimeError(
                f"rank {self._name}: this wire is detached, and {what} would have no effect; "
                "call it on the wire that gradwire.attach returned last"
            )
        return GridCall(self.group, self.other_shards(), self.timeout, method)

    def save(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the state of this rank, or of all ranks; RuntimeError inside ``backward()``."""
        if backward_pass() != -1:
            raise RuntimeError(
                f"rank {self._name}: Wire.state_dict was called inside backward(), where some residuals are "
                "those of this step and some are older; call it after backward() has returned"
            )
        tuning = None if self.tuned is None else self.tuned.save()
        state = self.state.save(self.choice.name, self.bridge.num_steps, self.rank, self.grid, tuning)
        for group in self.state_groups() if gather else ():
            state = gather_states(state, group, self.timeout, "Wire.state_dict")
        return state

    def other_shards(self) -> dist.ProcessGroup | None:
        """Return the ranks that hold the model's shards, if those that exchange messages hold one of them."""
        return None

    def state_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups over which states are gathered, one after the other."""
        return (self.group,)

    def record_event(self, event: str, **details: str) -> None:
        """Record an event at the current step."""
        self.bridge.checks.record_event(event, self.bridge.num_steps, **details)

    def detach(self) -> None:
        """Return the model to its own averaging, and close the runner."""
        # A runner that is closed has an error for whoever still uses it, which is not one of this run.
        self._ended_with, self._has_ended = self.first_failure, True
        self.leave()
        if not self.is_disabled:
            self.bridge.runner.close()
            self.record_event("detach")
            self.bridge.checks.close(has_failed=self._ended_with is not None)
