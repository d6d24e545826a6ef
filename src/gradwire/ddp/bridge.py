"""Between DDP's reducer and a runner: counts steps, and takes errors back to ``backward()``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future
from torch.profiler import record_function

from gradwire.averaging import Runner, completed
from gradwire.ddp.nonfinite import NonfinitePolicy
from gradwire.ddp.user_hooks import note_use
from gradwire.ddp.verification import Verification, compare
from gradwire.errors import Place, WireError, locate
from gradwire.peers import Group
from gradwire.telemetry import Recorder


class Bridge:
    """Takes buckets from one model's reducer to a runner, and errors back to ``backward()``.

    Note [How an error leaves a hook]: an exception set on the future reaches the user as a failed cast,
    and one raised inside the hook leaves DDP unable to run its next step. So the future is completed with
    the local gradients, and the error is raised by a callback of the autograd engine. DDP queues its own
    callback right after the last bucket's hook; ours, queued in that hook, queues a second one, which
    therefore runs when DDP has finished. Outside a backward pass (``join()``) there are no callbacks, and
    the last bucket's hook itself waits and raises.
    """

    def __init__(
        self,
        runner: Runner,
        rank: int,
        policy: NonfinitePolicy | None = None,
        verification: Verification | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.runner = runner
        self.policy = policy
        self.verification = verification
        self.recorder = recorder
        self.num_steps = 0
        """How many steps the run has had, those before a resume included."""
        self._rank = rank
        self._shadows: list[Future[Tensor]] = []

    def run(self, bucket: GradBucket) -> Future[Tensor]:
        """What DDP calls, once per bucket and in bucket order."""
        note_use(self.runner)
        if bucket.index() == 0:
            self.num_steps += 1
        place = Place(self._rank, self.num_steps - 1, bucket.index(), self.runner.name)
        in_backward = torch._C._current_graph_task_id() != -1
        local = bucket.buffer()  # before the hook, which may set another one
        future = None
        try:
            if self.runner.failure is None:
                future = self._start(bucket, place, shadow=not in_backward)
        except Exception as error:
            self.runner.fail(locate(error, place))
        if future is None:
            self.runner.abandon()
            future = completed(local)
        if not in_backward:
            # Not before the last: a step may be exchanged in other buckets than those that arrive.
            self._shadows.append(future)
            if bucket.is_last():
                shadows, self._shadows = self._shadows, []
                for shadow in shadows:
                    shadow.wait()
                self.raise_failure()
                self._verify(place, local.device, shadow=True)
        elif bucket.is_last():
            queue = Variable._execution_engine.queue_callback
            queue(functools.partial(queue, functools.partial(self._finish, place, local.device)))
        return future

    def _start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        if not torch._C._autograd._profiler_enabled():
            return self.runner.start(bucket, place, shadow=shadow)
        # The lane's thread is unknown to a profiler that was started after it, so this one records it.
        with record_function(f"gradwire::{place.hook} bucket {place.bucket}") as recorded:
            future = self.runner.start(bucket, place, shadow=shadow)
            if self.runner.runs_at_once:  # it may wait for later buckets, in whose range it is then exchanged
                return future
            # DDP must wait for this one: a range that ends after its profiler is a crash.
            ended: Future[Tensor] = recorded._call_end_callbacks_on_future(future)
        return ended

    def _finish(self, place: Place, device: torch.device) -> None:
        """What remains when DDP has finished a backward pass."""
        self.raise_failure()
        step, policy, recorder = place.step, self.policy, self.recorder
        try:
            self._verify(place, device, shadow=False)
            if policy is not None:
                policy.look(step)
        except (FloatingPointError, WireError) as error:
            if recorder is not None:
                recorder.tell_failure(step, error)
            raise
        if recorder is not None:
            recorder.end_step(step, self.runner.stats, 0 if policy is None else policy.num_skipped)

    def _verify(self, place: Place, device: torch.device, *, shadow: bool) -> None:
        """Compare the gradients with those of the other ranks, if it is time."""
        verification = self.verification
        if verification is None or not verification.is_due(place.step):
            return
        own, everyone = verification.hashes(shadow=shadow), []

        def talk(group: Group, device: torch.device) -> None:
            everyone.extend(compare(own, group, device))

        self.runner.run_collective(talk, place, device)
        self.raise_failure()
        verification.conclude(place.step, place.rank, everyone)

    def raise_failure(self) -> None:
        """Raise the first failure of any rank, if there is one."""
        if self.runner.failure is not None:
            if self.recorder is not None:
                self.recorder.tell_failure(self.num_steps - 1, self.runner.failure)
            raise self.runner.failure.with_traceback(None)
