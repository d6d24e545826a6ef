"""Take step times of a user's own training script, unchanged, with each recipe in turn."""

from __future__ import annotations

from collections.abc import Sequence

import gradwire
from gradwire.headroom.benchmark import OnProgress, compared_recipes
from gradwire.headroom.json_fields import printable
from gradwire.headroom.measure import conditions, slowest_ms
from gradwire.headroom.records import NOOP, Record, Row, row_name
from gradwire.headroom.script_launchers import ScriptFailed, choose_launcher
from gradwire.headroom.script_task import ScriptResult, ScriptTask
from gradwire.headroom.workloads import format_count
from gradwire.lab import Lab
from gradwire.scripts import Script

# DDP rebuilds its buckets after the first step; caches and allocators settle.
_NUM_WARM_UP_STEPS = 3
_DEFAULT_NUM_STEPS = 16

_Runs = dict[gradwire.Recipe | None, list[ScriptResult]]
"""Every rank's result by recipe; None is plain DDP, and the last one does not communicate."""


def measure_script(
    script: Script,
    recipes: Sequence[str | gradwire.Recipe],
    world_size: int,
    *,
    num_steps: int | None = None,
    budget: float | None = None,
    lab: Lab | None = None,
    on_progress: OnProgress | None = None,
) -> Record | None:
    """Run a script with plain DDP, with each recipe and without communication, and time its steps.

    A step lasts from one call of an optimizer to the next call of the same one. Each run ends after
    ``num_steps`` timed steps, on every rank after the same one. Logs and checkpoints of the script are
    written in every run.

    Args:
        script: the script; it makes its models ``DistributedDataParallel`` and its process group from
            the environment, as under torchrun.
        recipes: recipes to measure beside plain DDP and noop.
        world_size: number of ranks on this machine; ignored under torchrun.
        num_steps: timed steps of each run; 16 by default.
        budget: the budget of recipe ``auto``, to say what it would send for the last step's gradients.
        lab: the lab to run in, one rank on each host.
        on_progress: called with ``(runs done, runs in all)``.

    Returns the record; None under torchrun on ranks other than 0. Raises ValueError for unknown recipes,
    and `ScriptFailed`.
    """
    compared = compared_recipes(recipes)
    if budget is not None:
        gradwire.recipe(f"auto:budget={budget:g}")  # raises ValueError for what is no budget
    num_steps = _NUM_WARM_UP_STEPS + (num_steps or _DEFAULT_NUM_STEPS)
    launcher = choose_launcher(world_size, lab)
    runs: _Runs = {}
    for index, recipe in enumerate(compared):
        if on_progress is not None:
            on_progress(index, len(compared))
        # Only without communication are gradients left that are not averaged.
        own_budget = budget if recipe == gradwire.noop() else None
        task = ScriptTask(script, None if recipe is None else str(recipe), num_steps, own_budget)
        results = launcher.run(task, index)
        if results is not None:
            _check(task, results)
            runs[recipe] = results
    if on_progress is not None:
        on_progress(len(compared), len(compared))
    return _to_record(script, _without_refused(runs), lab, launcher.one_machine) if runs else None


def _without_refused(runs: _Runs) -> _Runs:
    """Leave out recipes that a model cannot have though it takes noop, such as low rank with FSDP2.

    Torch has averaged its gradients then. The run has logged why.
    """

    def num_refused(recipe: gradwire.Recipe | None) -> int:
        wires = runs[recipe][0].wires
        return 0 if wires is None else wires.num_refused

    usual = num_refused(gradwire.noop())
    return {recipe: results for recipe, results in runs.items() if num_refused(recipe) <= usual}


def _check(task: ScriptTask, results: Sequence[ScriptResult]) -> None:
    """Raise ScriptFailed if a run cannot be compared with the others."""
    wires = results[0].wires
    may_be_refused = wires is not None and wires.num_refused and task.recipe != NOOP
    if wires is not None and wires.num_models == 0 and not may_be_refused:
        raise ScriptFailed(
            f"{task.script} made no DistributedDataParallel or sharded model that gradwire could attach to "
            "(a hook of the script's own wins), so there is nothing to compare"
        )
    taken, needed = min(result.num_optimizer_steps for result in results), task.num_steps + 1
    if taken < needed:
        num_timed = taken - 1 - _NUM_WARM_UP_STEPS
        fewer = f", or time fewer steps: --steps {num_timed}" if num_timed > 0 else ""
        raise ScriptFailed(
            f"{task.script} ended after {taken} optimizer steps with {row_name(task.recipe)}; {needed} are "
            f"needed, {_NUM_WARM_UP_STEPS + 1} of them before the first that is timed: let it train longer"
            f"{fewer}"
        )


def _to_record(script: Script, runs: _Runs, lab: Lab | None, one_machine: bool) -> Record:
    """Make one record of every run's results."""
    first = runs[None][0]
    idle = runs[gradwire.noop()][0]
    wires = idle.wires
    assert wires is not None
    return Record(
        **conditions(lab, one_machine),
        world_size=len(runs[None]),
        threads_per_rank=first.num_threads,
        backend=first.backend,
        device=first.device,
        interleaved=False,
        bucket_mb=None,
        workload=f"{printable(str(script))}, {format_count(wires.num_parameters)} parameters",
        num_parameters=wires.num_parameters,
        gradient_bytes=wires.gradient_bytes,
        rows=tuple(_row(recipe, results, wires.exact_bytes) for recipe, results in runs.items()),
        proposal=idle.proposal,
        sharding=wires.sharding,
        no_proposal=idle.no_proposal,
        num_layers=wires.num_layers,
    )


def _row(recipe: gradwire.Recipe | None, results: Sequence[ScriptResult], exact_bytes: int) -> Row:
    times_ms = slowest_ms(result.times_s[_NUM_WARM_UP_STEPS:] for result in results)
    wires = results[0].wires
    if wires is None:
        return Row(row_name(recipe), times_ms, exact_bytes)
    counts = [None if result.wires is None else result.wires.bytes_per_step for result in results]
    known = [count for count in counts if count is not None]
    return Row(
        row_name(recipe),
        times_ms,
        max(known) if len(known) == len(counts) else None,
        num_messages=wires.num_messages,
        wait_ms=wires.wait_ms,
        work_ms=wires.work_ms,
        decisions=wires.decisions,
    )
