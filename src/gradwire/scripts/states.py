"""The states of a script's wires: when to save them, and when to load the one that fits the weights."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradwire.ddp import Wire, attachment_of, hash_of_parameters, is_ddp, shared_parameters
from gradwire.peers import CollectiveCall, timeout_of
from gradwire.scripts.observing import watch_steps
from gradwire.scripts.state_files import StateFiles

log = logging.getLogger("gradwire")


class ScriptStates:
    """The states of all wires of a script, in one folder."""

    def __init__(self, folder: Path | None, every: int) -> None:
        """Save every ``every`` steps to ``folder``, and at the end; keep nothing without a folder."""
        self._folder = folder
        self._every = every
        self._keepers: list[_StateKeeper] = []
        self._watching = contextlib.ExitStack()

    @property
    def are_kept(self) -> bool:
        """True if there is a folder for them."""
        return self._folder is not None

    def add(self, model: Any, wire: Wire) -> None:
        """Keep the state of another model's wire."""
        if self._folder is None:
            return
        if not self._keepers:
            self._watching.enter_context(watch_steps(self._note_step))
        self._save_all()  # the script may be done with the models before
        attachment = attachment_of(wire)
        files = StateFiles(self._folder, len(self._keepers), attachment.rank, attachment.world_size)
        keeper = _StateKeeper(model, wire, files, self._every)
        self._keepers.append(keeper)
        # A compiled model would trace it.
        before_forward = torch.compiler.disable(lambda model, inputs: keeper.before_forward(model))
        model.register_forward_pre_hook(before_forward)

    def end(self) -> None:
        """Save the last states, of all wires that have not failed."""
        self._watching.close()
        self._save_all()

    def describe(self, saved_at: Collection[int]) -> list[str]:
        """Return lines for the summary; the script has saved checkpoints after the steps ``saved_at``."""
        lines = [
            f"resumed at step {keeper.loaded_step} with the state in {self._folder}"
            for keeper in self._keepers
            if keeper.loaded_step is not None
        ]
        ends = {keeper.num_steps for keeper in self._keepers}
        missed = sorted(step for step in saved_at if step % self._every and step not in ends)
        if missed:
            divisor = math.gcd(self._every, *missed)
            lines.append(
                f"the script saved a checkpoint after step {missed[0]}, for which there is no state in "
                f"{self._folder}; a run resumed from it starts with an empty one. Use --state-every {divisor}"
            )
        return lines

    def _save_all(self) -> None:
        for keeper in self._keepers:
            keeper.save_last()

    def _note_step(self, optimizer: Optimizer) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for keeper in self._keepers:
            keeper.note_step(stepped)


class _StateKeeper:
    """Save and load the states of one model's wire, before forward passes and at the end."""

    def __init__(self, model: nn.Module, wire: Wire, files: StateFiles, every: int) -> None:
        self.loaded_step: int | None = None
        """The step of the state that was loaded, if one was."""
        self._model = weakref.ref(model)
        self._trained: nn.Module | None = None
        """The model, from a step on until all states are saved: a script that ends may have dropped it."""
        self._wire = wire
        self._files = files
        self._every = every
        self._is_new = True
        self._taken_step = -1
        """The last step that an optimizer has taken or a GradScaler has dropped."""
        self._saved_step = -1
        self._saved_weights = ""

    @property
    def num_steps(self) -> int:
        """The number of steps of the run so far, including those before it was resumed."""
        return attachment_of(self._wire).bridge.num_steps

    def note_step(self, stepped: Collection[int]) -> None:
        """Note a step of an optimizer that has the parameters with the ids ``stepped``."""
        model = self._model()
        if model is not None and any(id(parameter) in stepped for parameter in model.parameters()):
            self._taken_step, self._trained = self.num_steps, model

    def before_forward(self, model: Any) -> None:
        """Load the state that fits, the first time; later save one if it is time to."""
        if not (torch.is_grad_enabled() and model.training and self._wire.attached):
            return
        if self._is_new:
            self._is_new = False
            self.loaded_step = self._load(model)
            self._saved_step = self.num_steps
        elif self.num_steps % self._every == 0:
            self._save(model)

    def save_last(self) -> None:
        """Save the state of the last step, unless the wire has failed; the model may go then."""
        model, self._trained = self._model(), None
        if model is not None and self._wire.failure is None:
            self._save(model)

    def _save(self, model: Any) -> None:
        """Write this rank's state, unless that of this step is written or no optimizer has taken this step.

        A script that breaks off, or accumulates gradients, may have averaged a step that no optimizer has
        taken. The state before that step is the one that the weights belong to. An optimizer that is not
        torch's shows in the weights alone.
        """
        step = self.num_steps
        if step == self._saved_step or not step:
            return
        weights = hash_of_parameters(_parameters(model))
        if weights == self._saved_weights and step != self._taken_step:
            return
        self._saved_step, self._saved_weights = step, weights
        self._files.write(self._wire.state_dict(), step, weights)

    def _load(self, model: Any) -> int | None:
        """Load the newest state that every rank has for the present weights; return its step. Collective."""
        weights = hash_of_parameters(_parameters(model))
        saved_steps, states = self._files.saved_steps(), self._files.read(weights)
        common = set(states)
        # With replicas of shards: both groups, one after the other.
        for group in attachment_of(self._wire).state_groups():
            with CollectiveCall(group, timeout_of(group), "gradwire run --state") as call:
                notes = call.agree({"--state": "is used"}, note=json.dumps(sorted(common)))
            common = set.intersection(*(set(json.loads(note)) for note in notes))
        if common:
            step = max(common)
            self._wire.load_state_dict(states[step])
            self._saved_weights = weights
            return step
        if saved_steps and self._files.rank == 0:
            log.warning(
                "%s holds states of step(s) %s, but for the weights of this model not one on every rank: it "
                "starts with an empty state. If the script has resumed, --state-every must divide the step of"
                " its checkpoint; if not, all is well",
                self._files.folder,
                ", ".join(map(str, saved_steps)),
            )
        return None


def _parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that are the same on every rank, or this rank's shards of them."""
    return shared_parameters(model) if is_ddp(model) else dict(model.named_parameters())
