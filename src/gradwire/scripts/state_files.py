"""Files with the state of a script's wires, one per rank, found again by the weights they belong to.

A script resumes as it likes: from any file, with any library, before or after it makes its model. All of them
end with the saved weights in the model. So a file is named by a hash of the weights at its time, and the
state to load is the one whose weights are, bit for bit, those of the model when it is first trained.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.serialization import save

from gradwire.averaging import merge_state_dicts, read_saved
from gradwire.ddp import Wire, attachment_of, hash_of_parameters, is_ddp, shared_parameters
from gradwire.peers import CollectiveCall, timeout_of
from gradwire.scripts.observing import watch_steps

log = logging.getLogger("gradwire")

_NAME = re.compile(r"model(\d+)-step(\d+)-([0-9a-f]{16})-rank(\d+)of(\d+)\.pt")
NUM_KEPT = 4
"""The number of states that a rank keeps of each model."""


@dataclass(frozen=True)
class StateFile:
    """One rank's state of one model, as its name tells."""

    path: Path
    model: int
    step: int
    weights: str
    """The hash of the model's weights."""
    rank: int
    world_size: int

    @classmethod
    def parse(cls, path: Path) -> StateFile | None:
        """Return the file with this path; None if it is no state."""
        found = _NAME.fullmatch(path.name)
        if found is None:
            return None
        model, step, weights, rank, world_size = found.groups()
        return cls(path, int(model), int(step), weights, int(rank), int(world_size))


class ScriptStates:
    """The states of all wires of a script, in one folder."""

    def __init__(self, folder: Path | None, every: int) -> None:
        """Save every ``every`` steps to ``folder``, and at the end; keep nothing without a folder."""
        self._folder = folder
        self._every = every
        self._keepers: list[tuple[StateKeeper, weakref.ref[Any]]] = []
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
        keeper = StateKeeper(self._folder, self._every, len(self._keepers), wire)
        self._keepers.append((keeper, weakref.ref(model)))
        # A compiled model would trace it.
        before_forward = torch.compiler.disable(lambda model, inputs: keeper.before_forward(model))
        model.register_forward_pre_hook(before_forward)

    def end(self) -> None:
        """Save the last states, of all wires that have not failed."""
        self._watching.close()
        self._save_all()

    def _save_all(self) -> None:
        for keeper, ref in self._keepers:
            model = ref()
            if model is not None and keeper.wire.failure is None:
                keeper.save(model)
            keeper.trained = None

    def _note_step(self, optimizer: Optimizer) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for keeper, ref in self._keepers:
            model = ref()
            if model is not None and any(id(parameter) in stepped for parameter in model.parameters()):
                keeper.taken_step = keeper.num_steps
                keeper.trained = model

    def describe(self, saved_at: Collection[int]) -> list[str]:
        """Return lines for the summary; the script has saved checkpoints after the steps ``saved_at``."""
        lines = [
            f"resumed at step {keeper.loaded_step} with the state in {self._folder}"
            for keeper, _ in self._keepers
            if keeper.loaded_step is not None
        ]
        ends = {keeper.num_steps for keeper, _ in self._keepers}
        missed = sorted(step for step in saved_at if step % self._every and step not in ends)
        if missed:
            divisor = math.gcd(self._every, *missed)
            lines.append(
                f"the script saved a checkpoint after step {missed[0]}, for which there is no state in "
                f"{self._folder}; a run resumed from it starts with an empty one. Use --state-every {divisor}"
            )
        return lines


class StateKeeper:
    """Save and load the states of one model's wire, before forward passes and at the end."""

    def __init__(self, folder: Path, every: int, number: int, wire: Wire) -> None:
        self.wire = wire
        self.loaded_step: int | None = None
        self.taken_step = -1
        """The last step that an optimizer has taken or a GradScaler has dropped."""
        self.trained: Any = None
        """The model, from a step on until all states are saved: a script that ends may have dropped it."""
        self._folder = folder
        self._every = every
        self._number = number
        self._attachment = attachment_of(wire)
        self._rank, self._world_size = self._attachment.rank, self._attachment.world_size
        self._is_new = True
        self._saved_step = -1
        self._saved_weights = ""

    @property
    def num_steps(self) -> int:
        """The number of steps of the run so far, including those before it was resumed."""
        return self._attachment.bridge.num_steps

    def before_forward(self, model: Any) -> None:
        """Load the state that fits, the first time; later save one if it is time to."""
        if not (torch.is_grad_enabled() and model.training and self.wire.attached):
            return
        if self._is_new:
            self._is_new = False
            self.loaded_step = self._load(model)
            self._saved_step = self.num_steps
        elif self.num_steps % self._every == 0:
            self.save(model)

    def save(self, model: Any) -> None:
        """Write this rank's state, unless that of this step is written or no optimizer has taken this step.

        A script that breaks off, or accumulates gradients, may have averaged a step that no optimizer has
        taken. The state before that step is the one that the weights belong to. An optimizer that is not
        torch's shows in the weights alone.
        """
        step = self.num_steps
        if step == self._saved_step or not step:
            return
        weights = hash_of_parameters(_parameters(model))
        if weights == self._saved_weights and step != self.taken_step:
            return
        self._saved_step, self._saved_weights = step, weights
        name = f"model{self._number}-step{step}-{weights}-rank{self._rank}of{self._world_size}.pt"
        state = self.wire.state_dict()
        try:
            write_atomically(state, self._folder / name)
            own = [each for each in self._files() if each.rank == self._rank]
            for old in sorted(own, key=lambda each: each.path.stat().st_mtime)[:-NUM_KEPT]:
                old.path.unlink(missing_ok=True)
        except OSError as error:
            # A full disk must not end a run.
            log.warning(
                "rank %d: the state of step %d cannot be written to %s: %s. Training goes on; a run that is "
                "resumed from this step starts with an empty state",
                self._rank,
                step,
                self._folder,
                error,
            )

    def _files(self) -> list[StateFile]:
        found = filter(None, map(StateFile.parse, self._folder.iterdir()))
        return [each for each in found if each.model == self._number]

    def _load(self, model: Any) -> int | None:
        """Load the newest state that every rank has for the present weights; return its step. Collective."""
        weights = hash_of_parameters(_parameters(model))
        files = self._files()
        states = _readable_states([f for f in files if f.weights == weights], self._rank, self._world_size)
        common = set(states)
        for group in self._attachment.state_groups():  # with replicas of shards: both, one after the other
            with CollectiveCall(group, timeout_of(group), "gradwire run --state") as call:
                notes = call.agree({"--state": "is used"}, note=json.dumps(sorted(common)))
            common = set.intersection(*(set(json.loads(note)) for note in notes))
        if common:
            step = max(common)
            self.wire.load_state_dict(states[step])
            self._saved_weights = weights
            return step
        if files and self._rank == 0:
            steps = ", ".join(map(str, sorted({each.step for each in files})))
            log.warning(
                "%s holds states of step(s) %s, but for the weights of this model not one on every rank: it "
                "starts with an empty state. If the script has resumed, --state-every must divide the step of"
                " its checkpoint; if not, all is well",
                self._folder,
                steps,
            )
        return None


def _readable_states(files: list[StateFile], rank: int, world_size: int) -> dict[int, Mapping[str, Any]]:
    """Return the states that this rank can load, by step: its own, or those of another number of ranks."""
    found: dict[int, Mapping[str, Any]] = {}
    for step in {each.step for each in files}:
        for size in {each.world_size for each in files if each.step == step}:
            of_run = {each.rank: each for each in files if (each.step, each.world_size) == (step, size)}
            wanted = [rank] if size == world_size else list(range(size))
            try:
                states = [read_saved(path, path) for path in (of_run[each].path for each in wanted)]
                found[step] = states[0] if size == world_size else merge_state_dicts(states)
            except KeyError:  # not every file is there
                continue
            except Exception as error:
                log.warning("rank %d: a state of step %d is left out: %s", rank, step, error)
    return found


def write_atomically(state: Mapping[str, Any], path: Path) -> None:
    """Write a state so that the file is complete or absent, also after a power cut; may raise OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's own error does not say that the disk is full
            raise error.__context__ from None
        raise
    finally:
        partial.unlink(missing_ok=True)


def _parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that are the same on every rank, or this rank's shards of them."""
    return shared_parameters(model) if is_ddp(model) else dict(model.named_parameters())
