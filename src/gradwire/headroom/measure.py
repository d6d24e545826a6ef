"""Takes step times, of all recipes side by side, on real ranks of this machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom.records import ALLREDUCE, Machine, Record, Row
from gradwire.headroom.workloads import Workload
from gradwire.testing import run_ranks, send_message
from gradwire.testing.ranks import time_limit

# The first backward has DDP's provisional buckets, the second the final ones.
_NUM_WARM_UP_STEPS = 2
# Rows take turns this often, so that a slow minute of the machine is slow for all of them.
_STEPS_PER_TURN = 2
# No turn of a model that fits such a run takes this long: ranks that do are stuck.
_TURN_LIMIT_S = 600.0


def measure_steps(
    recipes: Sequence[str | gradwire.Recipe],
    world_size: int,
    workload: Workload,
    *,
    num_steps: int = 24,
    bucket_mb: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Record:
    """Time the recipes, plain DDP and no communication, taking turns in one run.

    Args:
        recipes: what to measure beside plain DDP and noop; a recipe that comes twice is measured once.
        world_size: number of ranks, all on this machine, each with one thread.
        workload: what a step computes.
        num_steps: timed steps of each row.
        bucket_mb: DDP's ``bucket_cap_mb``; by default DDP's own.
        on_progress: called with ``(steps done, steps in all)`` of all rows together.

    Raises:
        ValueError: there is no such recipe, or a number is below what makes sense.
        RanksFailed: a rank failed; the text says why.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, not {num_steps}")
    if bucket_mb is not None and not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be above 0, not {bucket_mb}")
    chosen = dict.fromkeys(map(gradwire.recipe, recipes))
    chosen.pop(gradwire.noop(), None)
    plan = _Plan((None, *chosen, gradwire.noop()), workload, num_steps, bucket_mb)

    def on_message(rank: int, num_done: int) -> None:
        if on_progress is not None:
            on_progress(num_done, plan.num_steps_in_all)

    outcomes = run_ranks(
        _measure,
        world_size,
        # Each turn has its own limit, kept by the ranks; this one is never reached before those.
        timeout=_TURN_LIMIT_S * (2 + len(plan.recipes) * (1 + len(plan.turns))),
        args=(plan,),
        on_message=on_message,
    )
    return Record(
        gradwire_version=gradwire.__version__,
        torch_version=torch.__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=Machine.here(),
        world_size=world_size,
        threads_per_rank=outcomes[0].num_threads,
        backend=outcomes[0].backend,
        bucket_mb=bucket_mb,
        workload=workload,
        rows=tuple(_row(plan, index, outcomes) for index in range(len(plan.recipes))),
    )


@dataclass(frozen=True)
class _Plan:
    recipes: tuple[gradwire.Recipe | None, ...]
    """A row each; None is plain DDP."""
    workload: Workload
    num_steps: int
    bucket_mb: float | None

    @property
    def turns(self) -> list[int]:
        """How many steps each row takes, turn by turn."""
        num_full, rest = divmod(self.num_steps, _STEPS_PER_TURN)
        return [_STEPS_PER_TURN] * num_full + [rest] * (rest > 0)

    @property
    def num_steps_in_all(self) -> int:
        return len(self.recipes) * (_NUM_WARM_UP_STEPS + self.num_steps)


@dataclass(frozen=True)
class _Outcome:
    """What one rank found, row by row."""

    times_s: list[list[float]]
    bytes_per_step: list[int | None]
    num_threads: int
    backend: str


def _row(plan: _Plan, index: int, outcomes: list[_Outcome]) -> Row:
    # A step is over when the slowest rank is through; in ms, to the microsecond.
    slowest = (max(times) for times in zip(*(o.times_s[index] for o in outcomes), strict=True))
    samples_ms = tuple(round(1e3 * seconds, 3) for seconds in slowest)
    recipe = plan.recipes[index]
    if recipe is None:
        gradient_bytes = 4 * plan.workload.num_parameters
        return Row(ALLREDUCE, samples_ms, 2 * (len(outcomes) - 1) * gradient_bytes // len(outcomes))
    counts = _known(o.bytes_per_step[index] for o in outcomes)
    return Row(str(recipe), samples_ms, None if counts is None else max(counts))


def _known(counts: Iterable[int | None]) -> list[int] | None:
    """The counts, or None if one of them is not known."""
    known: list[int] = []
    for count in counts:
        if count is None:
            return None
        known.append(count)
    return known


# --- inside a rank ---


class _Contender:
    """One row: its model and what is attached to that."""

    def __init__(self, plan: _Plan, recipe: gradwire.Recipe | None) -> None:
        torch.manual_seed(0)
        self._workload = plan.workload
        self._model = DistributedDataParallel(plan.workload.model(), bucket_cap_mb=plan.bucket_mb)
        self._wire = None if recipe is None else gradwire.attach(self._model, recipe)
        if self._wire is not None and not self._wire.attached:
            raise RuntimeError(f"{recipe} was not attached, so it cannot be measured: unset GRADWIRE_DISABLE")
        self.times_s: list[float] = []

    def step(self, inputs: Tensor) -> float:
        """Seconds that one step takes; without an optimizer, whose time is the same for all rows."""
        begin = time.perf_counter()
        self._model.zero_grad()
        self._workload.loss(self._model(inputs)).backward()
        return time.perf_counter() - begin

    def bytes_per_step(self) -> int | None:
        """Bytes this rank sent in the last step; None for plain DDP, which does not count them."""
        if self._wire is None:
            return None
        counts = _known(bucket.bytes_sent for bucket in self._wire.stats().steps[-1].buckets)
        return None if counts is None else sum(counts)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.detach()


def _measure(rank: int, plan: _Plan) -> _Outcome:
    with time_limit(_TURN_LIMIT_S):
        contenders = [_Contender(plan, recipe) for recipe in plan.recipes]
        torch.manual_seed(1 + rank)
        inputs = plan.workload.inputs()
    num_done = 0

    def take_turn(contender: _Contender, num_steps: int) -> list[float]:
        nonlocal num_done
        with time_limit(_TURN_LIMIT_S):
            dist.barrier()
            times_s = [contender.step(inputs) for _ in range(num_steps)]
        num_done += num_steps
        if rank == 0:
            send_message(num_done)
        return times_s

    for contender in contenders:
        take_turn(contender, _NUM_WARM_UP_STEPS)
    for turn, num_steps in enumerate(plan.turns):
        # The same order on all ranks, but another one each time: none always follows the same other.
        for contender in random.Random(turn).sample(contenders, k=len(contenders)):
            contender.times_s += take_turn(contender, num_steps)
    outcome = _Outcome(
        [contender.times_s for contender in contenders],
        [contender.bytes_per_step() for contender in contenders],
        torch.get_num_threads(),
        dist.get_backend(),
    )
    with time_limit(_TURN_LIMIT_S):
        dist.barrier()
        for contender in contenders:
            contender.close()
    return outcome
