"""Runners that step parameters as soon as their bucket has been averaged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future
from torch.optim import Optimizer

from gradwire.averaging import CollectiveWork, Runner
from gradwire.buckets import BucketLayout, Layouts
from gradwire.errors import Place, WireError, locate
from gradwire.exchanges import Scratch
from gradwire.lanes import Lane, Task, future_for, pass_on, report_nothing
from gradwire.peers import Group

Step = Callable[[Sequence[Tensor], Sequence[Tensor], Group], None]
"""Steps parameters with their averaged gradients; the group is the lane's."""


def step_parameters(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Step some of an optimizer's parameters, with these gradients, and leave the others as they are."""
    some = set(map(id, parameters))
    everyone = [group["params"] for group in optimizer.param_groups]
    own = [parameter.grad for parameter in parameters]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in some]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    finally:
        for parameter, gradient_before in zip(parameters, own, strict=True):
            parameter.grad = gradient_before
        for group, params in zip(optimizer.param_groups, everyone, strict=True):
            group["params"] = params


class SteppingRunner:
    """Averages a bucket with another runner, then steps its parameters, on a lane of their own.

    A bucket's parameters are not read any more when it is complete: every gradient that needs them has
    been computed. A failed averaging is not stepped with; a failed step fails the averaging, so that
    all ranks learn of it.
    """

    def __init__(
        self,
        inner: Runner,
        lane: Lane,
        step: Step,
        *,
        layouts: Layouts | None = None,
        after_backward: Callable[[], None] | None = None,
        at_the_end: bool = False,
    ) -> None:
        """Step each bucket as it arrives, or, ``at_the_end``, all of them when the last has been computed."""
        self.inner = inner
        self.stats = inner.stats
        self._lane = lane
        self._step = step
        self._layouts = layouts or Layouts()
        self._after_backward = after_backward
        self._at_the_end = at_the_end
        self._held: list[tuple[Task, Future[Tensor]]] = []

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def failure(self) -> WireError | None:
        return self.inner.failure or self._lane.failure

    @property
    def runs_at_once(self) -> bool:
        return self.inner.runs_at_once and self._lane.runs_at_once

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        layout, parameters = self._layouts.of(bucket), bucket.parameters()
        if not shadow:
            _require_gradients(layout, parameters)
        averaged = self.inner.start(bucket, place, shadow=shadow)
        run = functools.partial(self._run, averaged, layout, parameters, place)
        task = Task(bucket.buffer(), run, place, report_nothing)
        if bucket.is_last() and not shadow and self._after_backward is not None:
            # Twice, so that it runs when DDP has finished: see the note in `bridge.py`.
            queue = Variable._execution_engine.queue_callback
            queue(functools.partial(queue, self._after_backward))
        if self._at_the_end:
            return self._hold(bucket, task)
        if self._lane.runs_at_once and not averaged.done():
            return self._submit_after(averaged, task)
        return self._lane.submit(task)

    def _submit_after(self, averaged: Future[Tensor], task: Task) -> Future[Tensor]:
        """Submit a task once its bucket is averaged, which may wait for others; the lane must not."""
        outer = future_for(task.flat)

        def submit(_: Future[Tensor]) -> None:
            self._lane.submit(task).add_done_callback(functools.partial(pass_on, outer))

        averaged.add_done_callback(submit)
        return outer

    def _hold(self, bucket: GradBucket, task: Task) -> Future[Tensor]:
        """Submit all tasks of a step, in order, when the last bucket has come."""
        if bucket.index() == 0:
            self._held.clear()  # of a backward pass that broke off
        outer = future_for(task.flat)
        self._held.append((task, outer))
        if bucket.is_last():
            for held, future in self._held:
                done = self._lane.submit(held)
                done.add_done_callback(functools.partial(pass_on, future))
            self._held.clear()
        return outer

    def _run(
        self,
        averaged: Future[Tensor],
        layout: BucketLayout,
        parameters: list[Tensor],
        place: Place,
        flat: Tensor,
        group: Group,
        scratch: Scratch,
    ) -> Tensor:
        result = averaged.wait()
        if self.inner.failure is not None:
            raise self.inner.failure
        try:
            self._step(parameters, _gradients(layout, parameters, result), group)
        except Exception as error:
            self.inner.fail(locate(error, place))
            raise
        return result

    def run_collective(self, talk: CollectiveWork, place: Place, device: torch.device) -> None:
        self.inner.run_collective(talk, place, device)

    def fail(self, error: WireError) -> None:
        self.inner.fail(error)
        self._lane.fail(error)

    def abandon(self) -> None:
        self.inner.abandon()
        held, self._held = self._held, []
        for task, future in held:
            future.set_result(task.flat)

    def close(self) -> None:
        # First whatever the steps wait for.
        self.inner.close()
        self._lane.close()


def _gradients(layout: BucketLayout, parameters: list[Tensor], result: Tensor) -> list[Tensor]:
    """Every parameter's gradient, strided as the parameter is."""
    if result.is_sparse:
        return [result]
    views = layout.views(result.contiguous()).values()
    return [
        torch.view_as_complex(view) if parameter.is_complex() and not view.is_complex() else view
        for parameter, view in zip(parameters, views, strict=True)
    ]


def _require_gradients(layout: BucketLayout, parameters: list[Tensor]) -> None:
    for slot, parameter in zip(layout.slots, parameters, strict=True):
        if parameter.grad is None:
            raise ValueError(
                f"parameter {slot.name} got no gradient in this step: whether others used it is known "
                "after the backward pass alone, too late for a step in it. Freeze it, or step as usual"
            )
