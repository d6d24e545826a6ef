"""Steps of a sharded model: it takes gradients to the engine, and raises errors from ``backward()``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.averaging import Bucket, Engine, Tuned
from gradwire.buckets import BucketLayout, Slot
from gradwire.ddp import Runner, StepChecks
from gradwire.errors import Place, WireError, locate
from gradwire.peers import SealedClaim
from gradwire.recipes import fingerprint
from gradwire.torch_private import backward_pass, queue_callback


class HasSlot(Protocol):
    """A parameter, or values of several."""

    @property
    def name(self) -> str: ...

    def slot(self, num_shards: int = 1) -> Slot:
        """Return the slot of one shard, or of ``num_shards`` one after the other."""
        ...


class HasEnd(Protocol):
    """A unit whose gradients come in parts."""

    def require_complete(self) -> None:
        """Raise RuntimeError if a part is missing."""
        ...


@dataclass(frozen=True)
class _UnderWay:
    """A bucket that the engine averages, and what to do with its result."""

    future: Future[Tensor]
    end: Callable[[], None]


class Backward:
    """The backward passes of a model whose gradients an engine averages.

    Note [How an error leaves a sharded model]: an exception inside torch's reduction would leave its state
    in the middle of a pass. So after an error gradients stay local, all ranks go on to the end of the pass,
    and a callback of the autograd engine raises it there. torch queues a callback of its own before the
    first reduction, in which it may reduce more; ours is queued later, and so runs after it.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        device: torch.device,
        checks: StepChecks | None = None,
        share_failure: Callable[[WireError | None], WireError | None] | None = None,
    ) -> None:
        """Average by ``engine``.

        ``share_failure`` tells the ranks that are not the engine's of a failure, and returns theirs.
        """
        self.engine = engine
        self.runner: Runner = engine
        self.checks = checks or StepChecks()
        self.tuned: Tuned | None = None
        """The tuner of recipe ``auto``; None for other recipes."""
        self.num_steps = 0
        """The number of steps of the run, including those before a resume."""
        self.failure: WireError | None = None
        self._rank = rank
        self._device = device
        self._share_failure = share_failure
        self._pass_id: int | None = None
        self._num_buckets = 0
        self._under_way: list[_UnderWay] = []
        self._expected: list[HasEnd] = []
        self._layouts: dict[int, BucketLayout] = {}
        self._known: dict[tuple[object, ...], tuple[BucketLayout, SealedClaim]] = {}

    def current(self) -> tuple[BucketLayout, ...]:
        """Return the layouts of the most recent step, in the order in which buckets came."""
        return tuple(layout for _, layout in sorted(self._layouts.items()))

    def start(
        self,
        flat: Tensor,
        parameters: Sequence[HasSlot],
        end: Callable[[], None],
        *,
        num_shards: int = 1,
        factor: float | None = None,
        divisor: float = 1.0,
        may_be_late: bool = False,
    ) -> None:
        """Begin to average ``flat``, and call ``end`` when it is done: at the end of the pass, or earlier.

        Args:
            flat: the shards of ``parameters``, one after the other; or all shards of each rank, rank by rank.
            parameters: the parameters, in torch's order.
            end: takes the result from ``flat``, in which it is, or the values as they were after an error.
            num_shards: the number of ranks' shards in ``flat``.
            factor: the factor of the sum over ranks; None for a mean.
            divisor: by this, torch divides the result afterwards.
            may_be_late: True if nothing reads the result before the pass ends; otherwise this waits for it.
        """
        with contextlib.nullcontext() if may_be_late else self._blocked():
            self._start(flat, parameters, end, num_shards, factor, divisor)
            if not may_be_late:
                self._wait(0)

    def _start(
        self,
        flat: Tensor,
        parameters: Sequence[HasSlot],
        end: Callable[[], None],
        num_shards: int,
        factor: float | None,
        divisor: float,
    ) -> None:
        place = self._next_place()
        future: Future[Tensor] | None = None
        try:
            if self.engine.failure is None and self.failure is None:
                layout, claim = self._layout(place.bucket, flat, parameters, num_shards)
                bucket = Bucket(flat, layout, is_last=False, claim=claim, factor=factor, divisor=divisor)
                future = self.engine.start(bucket, place)
                if self.tuned is not None and num_shards > 1 and flat.device.type == "cpu":
                    self.tuned.count_until_done(future)
        except Exception as error:
            self.engine.fail(locate(error, place))
        if future is None:
            self.engine.give_up()
            end()
            return
        self._under_way.append(_UnderWay(future, end))

    def make_room(self) -> None:
        """Wait until one bucket at most is under way; each keeps the gradients of a unit in memory."""
        self._begin_pass()
        if len(self._under_way) > 1:
            with self._blocked():
                self._wait(1)

    def expect(self, unit: HasEnd) -> None:
        """Let ``unit`` check at the end of this pass that it has started all it was to start."""
        self._begin_pass()
        self._expected.append(unit)

    def fail(self, error: Exception) -> None:
        """Fail on every rank; the end of the pass raises the error."""
        self.engine.fail(locate(error, self._next_place()))
        self.engine.give_up()

    def _begin_pass(self) -> None:
        """Queue the end of this backward pass, once."""
        pass_id = backward_pass()
        if pass_id != self._pass_id:
            self._pass_id = pass_id
            # Those of a pass that broke off.
            self._under_way.clear()
            self._expected.clear()
            self._num_buckets = 0
            queue_callback(self._finish)

    def _next_place(self) -> Place:
        """Return the place of the next bucket; begin a step with the first one of a pass."""
        self._begin_pass()
        self.num_steps += self._num_buckets == 0
        self._num_buckets += 1
        return Place(self._rank, self.num_steps - 1, self._num_buckets - 1, self.engine.name)

    def _layout(
        self, index: int, flat: Tensor, parameters: Sequence[HasSlot], num_shards: int
    ) -> tuple[BucketLayout, SealedClaim]:
        # With the size: a unit of unknown parameters has one name, whichever of them torch leaves out.
        key = index, flat.dtype, flat.numel(), num_shards, *(each.name for each in parameters)
        if key not in self._known:
            slots = [each.slot(num_shards) for each in parameters]
            layout = BucketLayout.packed(index, flat.dtype, slots, num_shards)
            if layout.numel != flat.numel():
                raise ValueError(
                    f"torch reduces {flat.numel()} values of {[slot.name for slot in slots][:3]}..., which "
                    f"have {layout.numel}; gradwire does not know this version of torch"
                )
            self._known[key] = layout, SealedClaim(fingerprint.of_bucket(layout))
        layout, claim = self._known[key]
        self._layouts[index] = layout
        return layout, claim

    def _blocked(self) -> AbstractContextManager[None]:
        """Return a context in which the pass waits for a bucket; recipe ``auto`` counts the time."""
        return contextlib.nullcontext() if self.tuned is None else self.tuned.blocked(self._device)

    def _wait(self, num_left: int) -> None:
        """Wait until at most ``num_left`` buckets are under way; on CUDA, the current stream waits."""
        while len(self._under_way) > num_left:
            oldest = self._under_way.pop(0)
            oldest.future.wait()
            oldest.end()

    def _finish(self) -> None:
        """End a step after torch has finished its backward pass."""
        place = Place(self._rank, self.num_steps - 1, self._num_buckets, self.engine.name)
        self._pass_id = None
        try:
            while self._expected:
                self._expected.pop().require_complete()
        except RuntimeError as error:
            self.engine.fail(locate(error, place))
        if self._num_buckets:
            for index in [each for each in self._layouts if each >= self._num_buckets]:
                del self._layouts[index]
            with torch.no_grad():
                if self.tuned is not None:
                    self.tuned.end_arrivals(self._num_buckets, self._device)
                self.engine.flush()
                self._wait(0)
                if self.tuned is not None:
                    self.tuned.end_step(place, self._device)
            self.failure = self.failure or self._check(place)
        failure = self.failure or self.engine.failure
        if failure is not None:
            self.checks.record_failure(place.step, failure)
            raise failure.with_traceback(None)
        if self._num_buckets:  # otherwise gradients accumulate, and nothing was sent
            self.checks.finish_step(self.engine, place, self._device, is_verified=True)
            self._tune(place)

    def _tune(self, place: Place) -> None:
        """Let recipe ``auto`` decide, if it is due; raise the failure of any rank."""
        if self.tuned is None or not self.tuned.tuner.is_due:
            return
        self.tuned.start_report(place, self._device)
        self.tuned.decide(self._device)
        failure = self.engine.failure
        self.failure = failure if self._share_failure is None else self._share_failure(failure)
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def _check(self, place: Place) -> WireError | None:
        """Return the failure of this step on any rank, if there was one; verify gradients, if it is due."""
        failure = self.engine.failure
        if failure is None:
            try:
                self.checks.verify(self.engine, place, self._device, shadow=False)
            except WireError as error:
                failure = error
        # On CUDA the host would wait, so failures are shared only where it has to wait anyway.
        may_wait = self._device.type == "cpu" or self.checks.verifies(place.step)
        if self._share_failure is not None and may_wait:
            return self._share_failure(failure)
        return failure
