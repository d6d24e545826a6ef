"""A runner that steps an optimizer as soon as a bucket has been averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from gradwire.averaging import Pending
from gradwire.buckets import BucketLayout
from gradwire.ddp.bridge import queue_after_ddp
from gradwire.ddp.ddp_bucket import DDPBucket
from gradwire.ddp.runner import Runner
from gradwire.errors import Place, WireError, locate
from gradwire.exchanges import Scratch
from gradwire.lanes import CollectiveWork, Lane, Promise, Task
from gradwire.peers import Group

Step = Callable[[Sequence[Tensor], Sequence[Tensor], Group], None]
"""Step parameters with their averaged gradients, over the group of the lane."""


def step_parameters(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Step only these parameters of an optimizer, with these gradients."""
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
    """The optimizer step of one bucket's parameters, which waits for the bucket's average."""

    runner: Runner
    step: Step
    bucket: DDPBucket
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
    """Average a bucket with another runner, then step its parameters on a separate lane.

    Stepping during backward is safe: when a bucket is complete, every gradient that needs its parameters has
    been computed. After a failed average no step is taken. A failed step fails the averaging too, so that
    all ranks learn of it.
    """

    def __init__(
        self,
        inner: Runner,
        lane: Lane,
        step: Step,
        *,
        before_backward: Callable[[], None] | None = None,
        after_backward: Callable[[], None] | None = None,
        at_the_end: bool = False,
    ) -> None:
        """Step each bucket once it is averaged; with ``at_the_end``, step all once the last has arrived."""
        self.inner = inner
        self.stats = inner.stats
        self._lane = lane
        self._step = step
        self._before_backward = before_backward
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
    def runs_inline(self) -> bool:
        return self.inner.runs_inline and self._lane.runs_inline

    def start(self, bucket: DDPBucket, place: Place) -> Future[Tensor]:
        if not bucket.is_shadow:
            if place.bucket == 0 and self._before_backward is not None:
                self._before_backward()
            _require_gradients(bucket)
        averaged = self.inner.start(bucket, place)
        step = _ParameterStep(self.inner, self._step, bucket, averaged, Promise(bucket.flat), place)
        if bucket.closes_pass and not bucket.is_shadow and self._after_backward is not None:
            queue_after_ddp(self._after_backward)
        if self._at_the_end:
            self._pending.add(step)
            if bucket.is_last:
                for each in self._pending.take():
                    self._lane.submit(each.task())
        elif self._lane.runs_inline and not averaged.done():
            # The bucket may wait for later ones, and this lane would block them.
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
        # The inner runner closes first, since the steps wait for it.
        self.inner.close()
        self._lane.close()


def _gradients(layout: BucketLayout, parameters: Sequence[Tensor], result: Tensor) -> list[Tensor]:
    """Return every parameter's gradient, with the strides of the parameter."""
    if result.is_sparse:
        return [result]
    views = layout.views(result.contiguous()).values()
    return [
        torch.view_as_complex(view) if parameter.is_complex() and not view.is_complex() else view
        for parameter, view in zip(parameters, views, strict=True)
    ]


def _require_gradients(bucket: DDPBucket) -> None:
    for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
        if parameter.grad is None:
            raise ValueError(
                f"parameter {slot.name} got no gradient in this step; if other ranks used it, DDP knows only "
                "after the backward pass, too late to step during it. Freeze it, or step as usual"
            )
