"""Optimizer steps taken as soon as a bucket has been averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from gradwire.averaging import Bucket, Pending
from gradwire.buckets import BucketLayout
from gradwire.ddp.bridge import queue_after_ddp
from gradwire.ddp.runner import Runner
from gradwire.errors import Place, WireError, locate
from gradwire.exchanges import Scratch
from gradwire.lanes import CollectiveWork, Lane, Promise, Task
from gradwire.peers import Group

Step = Callable[[Sequence[Tensor], Sequence[Tensor], Group], None]
"""Step parameters with their averaged gradients; the group is the lane's."""


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


@dataclass(frozen=True, eq=False)
class _ParameterStep:
    """The step of one bucket's parameters, once the bucket is averaged."""

    runner: Runner
    step: Step
    bucket: Bucket
    averaged: Future[Tensor]
    promise: Promise
    place: Place

    def task(self) -> Task:
        return Task(self._run, (self.promise,), self.place)

    def _run(self, flats: Sequence[Tensor], group: Group, scratch: Scratch) -> Sequence[Tensor]:
        result = self.averaged.wait()
        if self.runner.failure is not None:
            raise self.runner.failure
        parameters = self.bucket.parameters
        try:
            self.step(parameters, _gradients(self.bucket.layout, parameters, result), group)
        except Exception as error:
            self.runner.fail(locate(error, self.place))
            raise
        return [result]


class SteppingRunner:
    """Averages a bucket with another runner, then steps its parameters, on a lane of their own.

    A bucket's parameters are not read any more when it is complete: every gradient that needs them has
    been computed. A failed averaging is not stepped with. A failed step fails the averaging, so that
    all ranks learn of it.
    """

    def __init__(
        self,
        inner: Runner,
        lane: Lane,
        step: Step,
        *,
        after_backward: Callable[[], None] | None = None,
        at_the_end: bool = False,
    ) -> None:
        """Step each bucket as it arrives, or, ``at_the_end``, all of them when the last has been computed."""
        self.inner = inner
        self.stats = inner.stats
        self._lane = lane
        self._step = step
        self._after_backward = after_backward
        self._at_the_end = at_the_end
        self._pending: Pending[_ParameterStep] = Pending()

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def failure(self) -> WireError | None:
        return self.inner.failure or self._lane.failure

    @property
    def runs_at_once(self) -> bool:
        return self.inner.runs_at_once and self._lane.runs_at_once

    def start(self, bucket: Bucket, place: Place) -> Future[Tensor]:
        if not bucket.is_shadow:
            _require_gradients(bucket)
        averaged = self.inner.start(bucket, place)
        step = _ParameterStep(self.inner, self._step, bucket, averaged, Promise(bucket.flat), place)
        if bucket.is_last and not bucket.is_shadow and self._after_backward is not None:
            queue_after_ddp(self._after_backward)
        if self._at_the_end:
            self._pending.add(step)
            if bucket.is_last:
                for each in self._pending.take():
                    self._lane.submit(each.task())
        elif self._lane.runs_at_once and not averaged.done():
            # The bucket may wait for others, and the lane must not wait for it.
            averaged.add_done_callback(lambda _: self._lane.submit(step.task()))
        else:
            self._lane.submit(step.task())
        return step.promise.future

    def run_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> None:
        self.inner.run_collective(work, place, device)

    def fail(self, error: WireError) -> None:
        self.inner.fail(error)
        self._lane.fail(error)

    def give_up(self) -> None:
        self.inner.give_up()
        self._pending.give_up()

    def close(self) -> None:
        # First the runner that the steps wait for.
        self.inner.close()
        self._lane.close()


def _gradients(layout: BucketLayout, parameters: Sequence[Tensor], result: Tensor) -> list[Tensor]:
    """Return every parameter's gradient, strided as the parameter is."""
    if result.is_sparse:
        return [result]
    views = layout.views(result.contiguous()).values()
    return [
        torch.view_as_complex(view) if parameter.is_complex() and not view.is_complex() else view
        for parameter, view in zip(parameters, views, strict=True)
    ]


def _require_gradients(bucket: Bucket) -> None:
    for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
        if parameter.grad is None:
            raise ValueError(
                f"parameter {slot.name} got no gradient in this step: whether others used it is known "
                "after the backward pass alone, too late for a step in it. Freeze it, or step as usual"
            )
