"""What averages a bucket, and a recipe of ours that does so on a lane."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradwire.averaging.coalesce import Bucket, Joint
from gradwire.averaging.regroup import Regrouping, Timeline, grouping_of
from gradwire.buckets import BucketLayout, Layouts, LossScale, Memory
from gradwire.errors import Place, WireError
from gradwire.exchanges import Context, Exchange, Scratch, average_sparse, rounds_of, shared_bytes
from gradwire.lanes import Lane, Task, future_for, report_nothing
from gradwire.ops import Scale
from gradwire.peers import Group, Traffic, gather, require_same
from gradwire.recipes import Recipe, fingerprint
from gradwire.telemetry import Meter, ScaleOf, StatsBook

CollectiveWork = Callable[[Group, torch.device], None]
"""Messages among the ranks that belong to no bucket, with tensors on the given device."""


class Runner(Protocol):
    """Averages buckets, and remembers the first failure of any rank."""

    stats: StatsBook

    @property
    def name(self) -> str: ...

    @property
    def failure(self) -> WireError | None: ...

    @property
    def runs_at_once(self) -> bool:
        """Whether nothing is left to this process once `start` has returned for the last bucket."""
        ...

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        """Begin to average; ``shadow`` says that ``join()`` feeds zeros for a rank without input."""
        ...

    def run_collective(self, talk: CollectiveWork, place: Place, device: torch.device) -> None:
        """Run ``talk`` on every rank after what was started before it, and return when it is over.

        What it raises is a failure, as one of a bucket on ``device`` would be.
        """
        ...

    def fail(self, error: WireError) -> None: ...

    def abandon(self) -> None:
        """Complete the buckets that wait for later ones, as they are: after a failure none will come."""
        ...

    def close(self) -> None: ...


class RecipeRunner:
    """Averages buckets with a recipe, on a lane."""

    def __init__(
        self,
        recipe: Recipe,
        lane: Lane | None,
        layouts: Layouts,
        divides_by_active: Callable[[], bool] = lambda: False,
        *,
        may_skip: bool = False,
        memory: Memory | None = None,
        num_transient: int = 0,
        loss_scale: LossScale | None = None,
        meter: Meter | None = None,
        may_wait: bool = False,
    ) -> None:
        """Run on ``lane``, which a recipe that does not communicate may do without.

        ``may_skip`` says that a parameter may have no gradient on any rank in a step; ``memory`` is what
        there is to remember already; after ``num_transient`` steps the reducer rebuilds its buckets;
        ``loss_scale`` is what residuals follow, and ``meter`` compares averages with exact ones. ``may_wait``
        says that nobody waits for a bucket before the last one has begun.
        """
        assert lane is not None or not recipe.exchange.communicates
        self.stats = StatsBook()
        self._recipe = recipe
        self._lane = lane
        self._layouts = layouts
        self._divides_by_active = divides_by_active
        self._may_skip = may_skip
        self.memory = Memory() if memory is None else memory
        self.timeline = Timeline(num_transient)
        self.loss_scale = loss_scale
        self._meter = meter
        self._regrouping = Regrouping()
        self._joint = Joint()
        self._may_wait = may_wait
        self._agreed: dict[int, tuple[Recipe, BucketLayout]] = {}

    @property
    def name(self) -> str:
        return str(self._recipe)

    def swap(self, recipe: Recipe, open_lane: Callable[[], Lane]) -> None:
        """Average with another recipe from now on; what the one before holds back stays in the memory."""
        if self._lane is None and recipe.exchange.communicates:
            self._lane = open_lane()
        self._recipe = recipe

    @property
    def failure(self) -> WireError | None:
        return None if self._lane is None else self._lane.failure

    @property
    def runs_at_once(self) -> bool:
        return self._lane is None or self._lane.runs_at_once

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        layout = self._layouts.of(bucket)
        if not self._recipe.exchange.communicates:
            self.stats.record(place, 0, 0, 0.0, 0.0)
            return completed(bucket.buffer())
        by_active = self._divides_by_active() and self._recipe.reduction == "mean"
        active = not shadow if by_active else None
        grouping, flat, is_last = self.timeline.at(place.step), bucket.buffer(), bucket.is_last()
        if is_last:
            self.timeline.arrived(place.step, grouping_of(self._layouts.current()))
        if grouping is None:
            return self._begin(active, flat, layout, place, is_last)
        submit = functools.partial(self._begin, active)
        return self._regrouping.add(flat, layout, place, grouping, submit, self.fail, is_last=is_last)

    def _begin(
        self, active: bool | None, flat: Tensor, layout: BucketLayout, place: Place, is_last: bool
    ) -> Future[Tensor]:
        """Exchange a bucket as it arrives, or with others if they share messages."""
        lane, exchange, meter = self._lane, self._recipe.exchange, self._meter
        assert lane is not None
        if layout.index == 0 and self.loss_scale is not None:
            self._start_talk(self._follow_loss_scale, place, flat.device)
        self._require_same_layout(layout, place, flat.device)
        scale_of = functools.partial(self._scale, active)
        context_of = functools.partial(self._context, scale_of, layout, place)
        is_measured = meter is not None and meter.is_due(place.step) and not flat.is_sparse
        may_wait = self._may_wait and lane.shares_messages and not is_measured and not flat.is_sparse
        num_bytes = shared_bytes(exchange, layout, place.step) if may_wait else 0
        if num_bytes:
            bucket = Bucket(flat, place, context_of, functools.partial(rounds_of, exchange))
            return self._joint.add(lane, bucket, num_bytes, self._record, is_last=is_last)
        if is_last:
            self._joint.release(lane, self._record)
        run = functools.partial(_average, exchange, context_of)
        task = Task(flat, run, place, self._record, overlaps=True)
        if is_measured:
            assert meter is not None
            return meter.submit(lane, task, layout, self.memory, scale_of)
        return lane.submit(task)

    def _require_same_layout(self, layout: BucketLayout, place: Place, device: torch.device) -> None:
        """Compare a bucket that is new with the other ranks', before anything of it is sent."""
        if self._layouts.are_named and self._agreed.get(layout.index) != (self._recipe, layout):
            # Ranks that would send messages of different sizes must not begin. Nobody waits for this: if it
            # fails, the lane runs nothing more.
            self._agreed[layout.index] = self._recipe, layout
            claim = {**fingerprint.of_recipe(self._recipe), **fingerprint.of_bucket(layout)}
            self._start_talk(functools.partial(require_same, claim), place, device)

    def run_collective(self, talk: CollectiveWork, place: Place, device: torch.device) -> None:
        self._start_talk(talk, place, device).wait()

    def _start_talk(self, talk: CollectiveWork, place: Place, device: torch.device) -> Future[Tensor]:
        def run(flat: Tensor, group: Group, scratch: Scratch) -> Tensor:
            talk(group, flat.device)
            return flat

        assert self._lane is not None
        return self._lane.submit(Task(torch.empty(0, device=device), run, place, report_nothing))

    def _follow_loss_scale(self, group: Group, device: torch.device) -> None:
        assert self.loss_scale is not None
        self.loss_scale.follow(self.memory)

    def _context(
        self,
        scale_of: ScaleOf,
        layout: BucketLayout,
        place: Place,
        flat: Tensor,
        group: Group,
        scratch: Scratch,
    ) -> Context:
        scale = scale_of(flat, group)
        return Context(group, scratch, scale, layout, self.memory, place.step, self._may_skip)

    def _scale(self, active: bool | None, flat: Tensor, group: Group) -> Scale:
        if active is not None:
            return 1 / _count_active(active, flat.device, group)
        return 1.0 if self._recipe.reduction == "sum" else 1 / group.size

    def _record(self, place: Place, traffic: Traffic, elapsed_s: float | None) -> None:
        wait_s = None if elapsed_s is None else traffic.wait_s
        work_s = None if elapsed_s is None else elapsed_s - traffic.wait_s
        self.stats.record(place, traffic.bytes_sent, traffic.num_messages, wait_s, work_s)

    def fail(self, error: WireError) -> None:
        if self._lane is not None:
            self._lane.fail(error)

    def abandon(self) -> None:
        self._joint.abandon()
        self._regrouping.abandon()

    def close(self) -> None:
        self.abandon()
        if self._lane is not None:
            self._lane.close()


def _average(
    exchange: Exchange,
    context_of: Callable[[Tensor, Group, Scratch], Context],
    flat: Tensor,
    group: Group,
    scratch: Scratch,
) -> Tensor:
    context = context_of(flat, group, scratch)
    if flat.is_sparse:
        return average_sparse(flat, group, context.scale)
    exchange.run(flat, context)
    return flat


def completed(value: Tensor) -> Future[Tensor]:
    """A future that holds ``value`` already."""
    future = future_for(value)
    future.set_result(value)
    return future


def _count_active(active: bool, device: torch.device, group: Group) -> Tensor:
    """How many ranks say that they are active, as a 0-d fp64 tensor."""
    votes = torch.zeros(group.size, dtype=torch.float64, device=device)
    votes[group.rank] = float(active)
    gather(votes.view(torch.uint8).chunk(group.size), group)
    return votes.sum()
