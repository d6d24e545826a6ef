"""The bridge from DDP's reducer to a runner; it counts steps and raises errors from ``backward()``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future
from torch.profiler import record_function

from gradwire.averaging import Tuned
from gradwire.buckets import Layouts
from gradwire.ddp.bucket_order import BucketOrder, BucketPosition
from gradwire.ddp.ddp_bucket import DDPBucket
from gradwire.ddp.hook_info import record_use
from gradwire.ddp.runner import Runner
from gradwire.ddp.step_checks import StepChecks
from gradwire.errors import Place, locate
from gradwire.lanes import completed
from gradwire.torch_private import GradBucket, end_range_with, profiler_is_on, queue_callback


class Bridge:
    """Take buckets from one model's reducer to a runner, and raise errors from ``backward()``.

    Note [How an error leaves a hook]: an exception set on the future reaches the user as a failed cast. An
    exception raised inside the hook leaves DDP unable to run its next step. So the future is completed with
    the local gradients, and a callback of the autograd engine raises the error. DDP queues its own callback
    right after the last bucket's hook, and ours must run after it. So the hook queues a callback that
    queues a second one. Outside a backward pass (in ``join()``) there are no callbacks, and the hook of the
    last bucket itself waits and raises. For the first pass of a static graph, see Note [Delayed passes].
    """

    def __init__(
        self,
        runner: Runner,
        layouts: Layouts,
        rank: int,
        checks: StepChecks | None = None,
        divides_by_active: Callable[[], bool] = lambda: False,
        num_parameters: int | None = None,
    ) -> None:
        """Take buckets of ``num_parameters`` per step, None if not known, from a reducer to ``runner``."""
        self.runner = runner
        self.checks = checks or StepChecks()
        self.tuned: Tuned | None = None
        """The tuner of recipe ``auto``; None for other recipes and for hooks."""
        self.num_steps = 0
        """The number of steps of the run, including those before a resume."""
        self._layouts = layouts
        self._rank = rank
        self._divides_by_active = divides_by_active
        self._order = BucketOrder(num_parameters)
        self._shadows: list[Future[Tensor]] = []

    def run(self, grad_bucket: GradBucket) -> Future[Tensor]:
        """Begin to average a bucket. DDP calls this once per bucket, in order."""
        record_use(self.runner)
        position = self._order.next(grad_bucket)
        if position.index == 0:
            self.num_steps += 1
        place = Place(self._rank, self.num_steps - 1, position.index, self.runner.name)
        local = grad_bucket.buffer()  # taken before the hook runs, which may set another buffer
        future = None
        try:
            if self.runner.failure is None:
                bucket = self._bucket(grad_bucket, position)
                future = self._start(bucket, place)
        except Exception as error:
            self.runner.fail(locate(error, place))
        if future is None:
            self.runner.give_up()
            future = completed(local)
        if not position.in_backward:
            self._wait_for_shadows(future, place, local.device, is_last=position.is_last)
        elif position.closes_pass:
            queue_after_ddp(functools.partial(self._finish, place, local.device))
        return future

    def raise_failure(self) -> None:
        """Raise the first failure of any rank, if there is one."""
        if self.runner.failure is not None:
            self.checks.record_failure(self.num_steps - 1, self.runner.failure)
            raise self.runner.failure.with_traceback(None)

    def _bucket(self, grad_bucket: GradBucket, position: BucketPosition) -> DDPBucket:
        flat, parameters, is_last = grad_bucket.buffer(), grad_bucket.parameters(), position.is_last
        layout = self._layouts.of(position.index, flat.dtype, parameters, is_last=is_last)
        return DDPBucket(
            flat,
            layout,
            is_last,
            position.in_backward if self._divides_by_active() else None,
            parameters=parameters,
            is_shadow=not position.in_backward,
            closes_pass=position.closes_pass,
            grad_bucket=grad_bucket,
        )

    def _start(self, bucket: DDPBucket, place: Place) -> Future[Tensor]:
        if not profiler_is_on():
            return self.runner.start(bucket, place)
        # A profiler does not see threads that were started before it, so this thread records the range.
        with record_function(f"gradwire::{place.hook} bucket {place.bucket}") as recorded:
            future = self.runner.start(bucket, place)
            if self.runner.runs_inline:  # a bucket that waits for later ones is averaged in their range
                return future
            # DDP must wait for the end of the range: one that ends after its profiler crashes the process.
            return end_range_with(recorded, future)

    def _wait_for_shadows(
        self, future: Future[Tensor], place: Place, device: torch.device, *, is_last: bool
    ) -> None:
        """Wait for the buckets of zeros that ``join()`` makes for a rank without input, when all are here."""
        # Not earlier: a regrouped step is averaged only when all its buckets have arrived. They are called
        # shadows, as in torch: the rank takes part in the collectives of the others.
        self._shadows.append(future)
        if is_last:
            shadows, self._shadows = self._shadows, []
            for shadow in shadows:
                shadow.wait()
            self.raise_failure()
            self._end_backward(place, device)
            self.checks.verify(self.runner, place, device, shadow=True)
            self._tune(place, device)

    def _finish(self, place: Place, device: torch.device) -> None:
        """End a step after DDP has finished its backward pass."""
        self.raise_failure()
        self._end_backward(place, device)
        self.checks.finish_step(self.runner, place, device)
        self._tune(place, device)

    def _end_backward(self, place: Place, device: torch.device) -> None:
        if self.tuned is not None:
            self.tuned.end_step(place, device)

    def _tune(self, place: Place, device: torch.device) -> None:
        if self.tuned is not None:
            self.tuned.start_report(place, device)
            self.tuned.decide(device)
            self.raise_failure()


def queue_after_ddp(callback: Callable[[], None]) -> None:
    """Call ``callback`` after DDP has finished the current backward pass; at the bucket that closes it.

    The callback is queued twice, since DDP queues its own after the hook and ours must run after that.
    """
    queue_callback(functools.partial(queue_callback, callback))
