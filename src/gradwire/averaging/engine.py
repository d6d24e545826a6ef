"""The engine, which takes buckets through its stages to a lane."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.averaging.bucket import Bucket
from gradwire.averaging.coalesce import Coalescer
from gradwire.averaging.job import Job, reads_step, repeat_key, run_jobs
from gradwire.averaging.layout_check import LayoutCheck
from gradwire.averaging.native import NativeMean
from gradwire.averaging.regroup import Regrouper
from gradwire.averaging.scaling import Scaling
from gradwire.averaging.state import RunState
from gradwire.buckets import BucketLayout
from gradwire.errors import Place, WireError
from gradwire.lanes import (
    CollectiveWork,
    Lane,
    Promise,
    RecordedRun,
    Repeat,
    Task,
    collective_task,
    completed,
    open_lane,
)
from gradwire.peers import Group, Traffic
from gradwire.recipes import Recipe
from gradwire.telemetry import Meter, StatsCollector

Observer = Callable[[BucketLayout, Tensor, Place, bool, float | None], None]
"""Sees a bucket right before it is averaged, if it is the last of its step, and its weight in the mean."""


class Engine:
    """Average buckets by a recipe. The stages are: regroup, coalesce, measure, submit to a lane."""

    def __init__(
        self,
        recipe: Recipe,
        lane: Lane | None,
        state: RunState | None = None,
        *,
        meter: Meter | None = None,
        layout_check: LayoutCheck | None = None,
        may_wait: bool = False,
        may_have_unused: bool = False,
    ) -> None:
        """Average by ``recipe``.

        Args:
            recipe: how buckets are averaged.
            lane: where exchanges run; None for a recipe that does not communicate.
            state: the state of an earlier run; None to begin anew.
            meter: compares averages with exact ones; None to compare nothing.
            layout_check: compares new layouts with the other ranks'; None if parameters have no names.
            may_wait: True if the caller starts all buckets of a step before it waits for one of them.
            may_have_unused: True if a step may leave a parameter unused on every rank.
        """
        assert lane is not None or not recipe.exchange.communicates
        self.recipe = recipe
        self.stats = StatsCollector()
        self.state = state or RunState()
        self.coalescer = Coalescer()
        self.native: NativeMean | None = None
        """Takes exact means faster than the lane does, for buckets that `_goes_natively` lets through."""
        self.observer: Observer | None = None
        """Sees buckets in the grouping in which they are averaged; None for recipes that need none."""
        self._lane: Lane | None = None
        self._regrouper = Regrouper(self.state.timeline)
        self._meter = meter
        self._layout_check = layout_check
        self._may_wait = may_wait
        self._may_have_unused = may_have_unused
        if lane is not None:
            self._use_lane(lane)

    @property
    def name(self) -> str:
        return str(self.recipe)

    @property
    def failure(self) -> WireError | None:
        return None if self._lane is None else self._lane.failure

    @property
    def runs_inline(self) -> bool:
        """True if `start` leaves no work behind once it has returned for the last bucket."""
        return self._lane is None or self._lane.runs_inline

    def start(self, bucket: Bucket, place: Place) -> Future[Tensor]:
        """Begin to average ``bucket``, in place if it is dense, and return a future of the result."""
        recipe, exchange = self.recipe, bucket.exchange or self.recipe.exchange
        if not exchange.communicates:
            self.stats.record(place, 0, 0, 0.0, 0.0)
            return completed(bucket.flat)
        if self.native is not None and self._goes_natively(bucket, place):
            self._show(bucket.layout, bucket.flat, place, None, is_last=bucket.is_last)
            return self.native.start(bucket.flat, place, self.stats.record)
        is_active = bucket.is_active if recipe.reduction == "mean" else None
        scaling = Scaling(
            recipe.reduction, is_active, bucket.weight, bucket.factor, bucket.divisor, bucket.claim
        )
        job = Job(
            Promise(bucket.flat),
            bucket.layout,
            place,
            exchange,
            scaling,
            bucket.is_last,
            bucket.may_overlap,
        )
        jobs = self._regrouper.take(job, self.fail)
        try:
            for each in jobs:
                self._show(each.layout, each.flat, each.place, each.scaling.weight, is_last=each.is_last)
                self._prepare(each)
                for batch in self.coalescer.take(each, may_wait=not self._is_measured(each.place, each.flat)):
                    self._submit(batch)
        except Exception:
            for each in jobs:  # some have left the regrouper, and no lane knows them
                each.promise.give_up()
            raise
        return job.promise.future

    def swap(self, recipe: Recipe, open_lane: Callable[[], Lane]) -> None:
        """Average by another recipe from now on; the residuals of the old one stay in the state."""
        if self._lane is None and recipe.exchange.communicates:
            self._use_lane(open_lane())
        self.recipe, self.native, self.observer = recipe, None, None

    def run_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> None:
        """Run ``work`` on every rank after all buckets started before it, and wait for its end.

        An error in it becomes this engine's `failure`, as an error in a bucket does.
        """
        self.start_collective(work, place, device).wait()

    def start_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> Future[Tensor]:
        """Do as `run_collective`, but return a future of its end instead of waiting."""
        assert self._lane is not None
        task = collective_task(work, place, device)
        self._lane.submit(task)
        return task.promises[0].future

    def flush(self) -> None:
        """Submit the waiting buckets; for a caller that does not know which bucket of a step is the last."""
        for batch in self.coalescer.release():
            self._submit(batch)

    def fail(self, error: WireError) -> None:
        """Fail with ``error``, on every rank."""
        if self._lane is not None:
            self._lane.fail(error)

    def give_up(self) -> None:
        """Complete the waiting buckets as they are; after a failure, no later bucket will come."""
        self.coalescer.give_up()
        self._regrouper.give_up()

    def close(self) -> None:
        """End the lane; buckets under way are given up."""
        self.give_up()
        if self._lane is not None:
            self._lane.close()

    def _use_lane(self, lane: Lane) -> None:
        self._lane = lane
        if self._may_wait:
            self.coalescer = Coalescer.for_lane(lane)

    def _show(
        self, layout: BucketLayout, flat: Tensor, place: Place, weight: float | None, *, is_last: bool
    ) -> None:
        if self.observer is not None:
            self.observer(layout, flat, place, is_last, weight)

    def _prepare(self, job: Job) -> None:
        """Submit the collective work that must precede the job; if it fails, the lane runs nothing more."""
        if job.layout.index == 0 and self.state.loss_scale is not None:
            self.start_collective(self._follow_loss_scale, job.place, job.flat.device)
        work = None if self._layout_check is None else self._layout_check.work_for(job.layout, self.recipe)
        if work is not None:
            assert self._lane is not None
            self._lane.free_scratch()  # DDP's first bucket holds all parameters; later ones need less
            self.start_collective(work, job.place, job.flat.device)

    def _submit(self, batch: list[Job]) -> None:
        """Submit jobs that share messages; the statistics count messages and times for the last job."""
        assert self._lane is not None
        for job in batch[:-1]:
            self.stats.report(job.place, Traffic(), None if self._lane.runs_inline else 0.0)
        last, promises = batch[-1], tuple(job.promise for job in batch)
        run = functools.partial(run_jobs, batch, self.state.memory, self._may_have_unused)
        may_overlap = all(job.may_overlap for job in batch)
        tasks = [Task(run, promises, last.place, self.stats.report, may_overlap, self._repeat(batch, run))]
        if self._meter is not None and self._is_measured(last.place, last.flat):
            tasks = self._meter.measured(tasks[0], last.layout, self.state.memory, last.scaling.factor)
        for task in tasks:
            self._lane.submit(task)

    def _repeat(self, batch: list[Job], run: RecordedRun) -> Repeat | None:
        """Return how the lane can record a task; None if it cannot."""
        assert self._lane is not None
        key = repeat_key(batch, self.state.memory, self._may_have_unused) if self._lane.records else None
        return None if key is None else Repeat(key, run, functools.partial(reads_step, batch))

    def _is_measured(self, place: Place, flat: Tensor) -> bool:
        return self._meter is not None and self._meter.is_due(place.step) and not flat.is_sparse

    def _goes_natively(self, bucket: Bucket, place: Place) -> bool:
        """Return True for a plain mean: nothing is owed, compared, weighted, measured or regrouped."""
        # The group sums in a bucket's own dtype.
        is_exact = bucket.flat.dtype in (torch.float32, torch.float64) and not bucket.flat.is_sparse
        is_plain = bucket.exchange is None and bucket.claim is None
        options = (bucket.is_active, bucket.weight, bucket.factor, self.state.timeline.at(place.step))
        return (
            is_exact
            and is_plain
            and self.recipe.reduction == "mean"
            and all(option is None for option in options)
            and not self.state.memory.owes(bucket.layout)
            and not self._is_measured(place, bucket.flat)
        )

    def _follow_loss_scale(self, group: Group, device: torch.device) -> None:
        assert self.state.loss_scale is not None
        self.state.loss_scale.follow(self.state.memory)


def open_engine(
    recipe: Recipe,
    group: dist.ProcessGroup,
    device: torch.device,
    rendezvous: str,
    state: RunState | None = None,
    *,
    late: bool = False,
    meter: Meter | None = None,
    layout_check: LayoutCheck | None = None,
    may_wait: bool = False,
    may_have_unused: bool = False,
    in_steps: bool = False,
) -> Engine:
    """Open an engine and its lane over ``group``; collective.

    Args:
        recipe: how buckets are averaged.
        group: the ranks to average over.
        device: where the buckets are.
        rendezvous: a name that all ranks share, and that the group has not used before.
        state: the state of an earlier run; None to begin anew.
        late: True to connect while buckets queue; for hooks, which must not wait for other ranks.
        meter, layout_check, may_wait, may_have_unused: as for `Engine`.
        in_steps: as for `open_lane`.
    """
    lane = None
    if recipe.exchange.communicates:
        lane = open_lane(group, device, rendezvous, late=late, in_steps=in_steps)
    return Engine(
        recipe,
        lane,
        state,
        meter=meter,
        layout_check=layout_check,
        may_wait=may_wait,
        may_have_unused=may_have_unused,
    )
