"""One rank of a script that is measured, in a process of its own.

``python -m gradwire.headroom.script_rank TASK RESULT_FILE LIFELINE`` runs the script with one recipe, times
its steps, and ends it after the number of steps in the task.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.ddp import Attachments, Wire, attachment_of, is_ddp
from gradwire.headroom.decisions import decisions_of
from gradwire.headroom.proposals import propose_encodings
from gradwire.headroom.records import Proposal, ring_bytes
from gradwire.headroom.script_task import ScriptResult, ScriptTask, WireTotals
from gradwire.headroom.sharding import Sharding
from gradwire.headroom.typical_steps import sent_per_step, typical_ms
from gradwire.processes import end_with_parent
from gradwire.scripts import observe, refuse_launchers, run_script, show_error
from gradwire.sharded import attach_to_all
from gradwire.training import count_layers

_KeptModel = tuple[nn.Module, Wire]
"""A model and its wire, kept after the script or its framework has dropped them."""


class _EnoughSteps(BaseException):
    """Ends the script. It is no Exception, because scripts may catch those."""


class _Stopwatch:
    """Notes when each training step ends, and raises after the last one that was asked for.

    One step may call several optimizers, such as a generator's and its critic's. Only the first call counts.
    When an optimizer is called a second time, the next step has begun.
    """

    def __init__(self, num_steps: int) -> None:
        self.ends_s: list[float] = []
        """Times at which steps ended."""
        self.backend = "none"
        self._num_steps = num_steps
        self._called: set[int] = set()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._called and id(optimizer) not in self._called:
            self._called.add(id(optimizer))
            return
        self._called = {id(optimizer)}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends_s.append(time.perf_counter())
        if len(self.ends_s) > self._num_steps:
            self.backend = dist.get_backend() if dist.is_initialized() else "none"
            raise _EnoughSteps


def main() -> None:
    """Run the task of the first argument, and write the result to the file of the second."""
    task, result_file, lifeline = ScriptTask.from_json(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    end_with_parent(lambda: os.read(lifeline, 1))
    stopwatch = _Stopwatch(task.num_steps)
    register_optimizer_step_post_hook(stopwatch)
    models: list[_KeptModel] = []

    def keep(model: nn.Module, wire: Wire) -> None:
        if task.budget is not None:
            models.append((model, wire))

    attaching = attach_to_all(task.recipe, keep) if task.recipe else contextlib.nullcontext()
    with attaching as attachments, observe(), refuse_launchers():
        _run_until_enough(task)
        wires = None if attachments is None else _totals(attachments)
        is_over = len(stopwatch.ends_s) > task.num_steps
        proposal = _propose(models, task.budget) if is_over else None
        no_proposal = _left_out(models, task.budget, proposal)
    result = ScriptResult(
        times_s=tuple(end - begin for begin, end in pairwise(stopwatch.ends_s)),
        num_threads=torch.get_num_threads(),
        backend=stopwatch.backend,
        device=torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
        num_optimizer_steps=len(stopwatch.ends_s),
        wires=wires,
        proposal=proposal,
        no_proposal=no_proposal,
    )
    # Whoever waits for the file must never see a part of it.
    unfinished = result_file.with_suffix(".part")
    unfinished.write_text(result.to_json())
    unfinished.rename(result_file)
    if dist.is_initialized():
        # All ranks are here, at the same step. None may close its connections while another still reads.
        dist.barrier()
        dist.destroy_process_group()


def _run_until_enough(task: ScriptTask) -> None:
    """Run the script until it ends or has taken enough steps; exit with its error if it fails."""
    try:
        run_script(task.script)
    except _EnoughSteps:
        pass
    except SystemExit as end:
        if end.code:
            raise
    except Exception as error:
        show_error(error)
        sys.exit(1)


def _totals(attachments: Attachments) -> WireTotals:
    """Add up the figures of a typical step of all models."""
    kept = [attachment.wire.stats().steps for attachment in attachments.made]
    steps = [of_model for of_model in kept if of_model]  # others send nothing
    models = [_gradients_of(attachment.wire) for attachment in attachments.made]
    kinds = {None if each.sharding is None else each.sharding.kind for each in models}

    num_bytes, num_messages, wait_ms, work_ms = (
        _sum(sent_per_step(of_model, "bytes_sent") for of_model in steps),
        _sum(sent_per_step(of_model, "num_messages") for of_model in steps),
        _sum(typical_ms(of_model, "wait_ms") for of_model in steps),
        _sum(typical_ms(of_model, "work_ms") for of_model in steps),
    )
    return WireTotals(
        num_models=len(attachments.made) - attachments.num_given_way,
        num_refused=attachments.num_refused,
        bytes_per_step=None if num_bytes is None else int(num_bytes),
        num_messages=None if num_messages is None else int(num_messages),
        wait_ms=wait_ms,
        work_ms=work_ms,
        num_parameters=sum(each.num_values for each in models),
        gradient_bytes=sum(each.num_bytes for each in models),
        exact_bytes=sum(each.exact_bytes for each in models),
        sharding=kinds.pop() if len(kinds) == 1 else None,
        decisions=decisions_of(attachment.wire for attachment in attachments.made),
        num_layers=min((each.num_layers for each in models if each.num_layers), default=None),
    )


def _sum(figures: Iterable[float | None]) -> float | None:
    """Return the sum; None if a figure is unknown."""
    known = list(figures)
    return None if None in known else math.fsum(figure or 0.0 for figure in known)


@dataclass(frozen=True)
class _Gradients:
    """The gradients of one whole model, and how it is sharded."""

    num_values: int
    num_bytes: int
    world_size: int
    sharding: Sharding | None
    num_layers: int

    @property
    def exact_bytes(self) -> int:
        """Bytes that a rank has to send for exact gradients, in rings."""
        if self.sharding is None:
            return ring_bytes(self.num_bytes, self.world_size)
        return self.sharding.sent_bytes(self.num_bytes, self.world_size)


def _gradients_of(wire: Wire) -> _Gradients:
    layouts, grid = wire.layout(), attachment_of(wire).grid
    sharding, num_shards = None, 1
    if grid.num_shards > 1:
        sharding = Sharding("hsdp" if grid.num_replicas > 1 else "fsdp", grid.num_shards)
        num_shards = grid.num_shards if sharding.kind == "hsdp" else 1  # of which a rank averages one
    return _Gradients(
        num_shards * sum(layout.numel for layout in layouts),
        num_shards * sum(layout.numel * layout.dtype.itemsize for layout in layouts),
        grid.world_size,
        sharding,
        count_layers(slot.name for layout in layouts for slot in layout.slots),
    )


def _left_out(models: Sequence[_KeptModel], budget: float | None, proposal: Proposal | None) -> str | None:
    """Return the models that ``proposal`` leaves out because they are sharded; None if there are none."""
    num_sharded = sum(not is_ddp(model) for model, _ in models)
    if budget is None or not num_sharded:
        return None
    why = "--budget reads the gradients of DDP models alone."
    if proposal is None:
        which = "the model" if num_sharded == 1 else f"{num_sharded} models"
        return (
            f"What auto:budget={budget:g} would send is not known: fully_shard has sharded {which}, and {why}"
        )
    which = "a model" if num_sharded == 1 else f"{num_sharded} models"
    return f"That leaves out {which} that fully_shard has sharded: {why}"


def _propose(models: Sequence[_KeptModel], budget: float | None) -> Proposal | None:
    """Return what ``auto`` would send for all models together; collective. Their recipe is noop.

    Optimizers have stepped, and what comes after has not run, so the last gradients are still there.
    """
    if budget is None:
        return None
    wires = [wire for model, wire in models if wire.attached and is_ddp(model)]
    if not wires or dist.get_world_size() == 1:
        return None
    found = [propose_encodings(wire, wire.group, budget) for wire in wires]
    counts: Counter[str] = Counter()
    for each in found:
        counts.update(dict(each.counts))
    errors = [each.error for each in found if each.error is not None]
    return Proposal(
        found[0].recipe,
        sum(each.bytes_per_step for each in found),
        max(errors, default=None),
        tuple(sorted(counts.items())),
    )


if __name__ == "__main__":
    main()
