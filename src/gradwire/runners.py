"""What averages a bucket: a recipe of ours on a lane, or a hook of the user's, checked."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradwire.errors import Place, WireError, locate, original
from gradwire.exchanges import Context, Scratch, average_sparse
from gradwire.execution import Lane, Task, future_for
from gradwire.guard import Guard
from gradwire.layout import BucketLayout, Layouts
from gradwire.loss_scale import LossScale
from gradwire.measuring import Meter, ScaleOf
from gradwire.memory import Memory
from gradwire.ops import Scale
from gradwire.recipes import Recipe
from gradwire.regroup import Regrouping, Timeline, grouping_of
from gradwire.stats import StatsBook
from gradwire.transport import Group, Traffic, gather


class Runner(Protocol):
    """Averages buckets, and remembers the first failure of any rank."""

    stats: StatsBook

    @property
    def name(self) -> str: ...

    @property
    def failure(self) -> WireError | None: ...

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        """Begin to average; ``shadow`` says that ``join()`` feeds zeros for a rank without input."""
        ...

    def fail(self, error: WireError) -> None: ...

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
    ) -> None:
        """Run on ``lane``, which a recipe that does not communicate may do without.

        ``may_skip`` says that a parameter may have no gradient on any rank in a step; ``memory`` is what
        there is to remember already; after ``num_transient`` steps the reducer rebuilds its buckets;
        ``loss_scale`` is what residuals follow, and ``meter`` compares averages with exact ones.
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
            return self._submit(active, flat, layout, place)
        submit = functools.partial(self._submit, active)
        return self._regrouping.add(flat, layout, place, grouping, submit, self.fail, is_last=is_last)

    def _submit(
        self, active: bool | None, flat: Tensor, layout: BucketLayout, place: Place
    ) -> Future[Tensor]:
        assert self._lane is not None
        scale_of = functools.partial(self._scale, active)
        run = functools.partial(self._average, scale_of, layout, place.step)
        task = Task(flat, run, place, self._record)
        if self._meter is not None and self._meter.is_due(place.step) and not flat.is_sparse:
            return self._meter.submit(self._lane, task, layout, self.memory, scale_of)
        return self._lane.submit(task)

    def _average(
        self,
        scale_of: ScaleOf,
        layout: BucketLayout,
        step: int,
        flat: Tensor,
        group: Group,
        scratch: Scratch,
    ) -> Tensor:
        if layout.index == 0 and self.loss_scale is not None:
            self.loss_scale.follow(self.memory)
        scale = scale_of(flat, group)
        if flat.is_sparse:
            return average_sparse(flat, group, scale)
        context = Context(group, scratch, scale, layout, self.memory, step, self._may_skip)
        self._recipe.exchange.run(flat, context)
        return flat

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

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()


class HookRunner:
    """Runs a hook of the user's or of torch's, and checks what it returns."""

    def __init__(self, hook: Callable[..., Any], state: object, guard: Guard | None) -> None:
        """Without a guard, nobody ends the waiting for peers that have failed."""
        self.name = hook_name(hook)
        self.stats = StatsBook()
        self._hook = hook
        self._state = state
        self._guard = guard
        self._failure: WireError | None = None

    @property
    def failure(self) -> WireError | None:
        return self._failure if self._guard is None else self._guard.failure

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        local, begin = bucket.buffer(), time.perf_counter()
        with _noting() as used:
            answer = require_future(self.name, self._hook(self._state, bucket))
        work_s, called = time.perf_counter() - begin, time.perf_counter()
        outer, lock = future_for(local), threading.Lock()

        def settle(value: Tensor) -> None:
            with lock:
                if not outer.done():
                    outer.set_result(value)

        def take(done: Future[Any]) -> None:
            # torch would only log what is raised here, and DDP would wait for ever.
            try:
                value = check_result(self.name, done.value(), local)
                for failure in filter(None, (runner.failure for runner in used)):
                    raise failure
            except Exception as error:
                self.fail(locate(original(error), place))
                value = local
            else:
                waited_s = time.perf_counter() - called
                times = (None, None) if local.is_cuda else (waited_s, work_s)
                self.stats.record(place, None, None, *times)
            settle(value)

        if self._guard is not None:
            self._guard.watch(answer, place, lambda: settle(local))
        answer.add_done_callback(take)
        return outer

    def fail(self, error: WireError) -> None:
        if self._guard is None:
            self._failure = self._failure or error
        else:
            self._guard.fail(error)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.close()


_calls = threading.local()


@contextlib.contextmanager
def _noting() -> Iterator[list[Runner]]:
    """The runners that are used inside: hooks of ours nest in others, and their futures never fail."""
    outer, _calls.used = getattr(_calls, "used", None), []
    try:
        yield _calls.used
    finally:
        _calls.used = outer


def note_use(runner: Runner) -> None:
    """Tell the hook that is being called, if one is, that it depends on ``runner``."""
    used = getattr(_calls, "used", None)
    if used is not None:
        used.append(runner)


def completed(value: Tensor) -> Future[Tensor]:
    """A future that holds ``value`` already."""
    future = future_for(value)
    future.set_result(value)
    return future


def require_future(name: str, answer: object) -> Future[Any]:
    """``answer`` if it is what a hook must return; else TypeError."""
    if not isinstance(answer, torch._C.Future):
        kind = type(answer)
        raise TypeError(
            f"{name} must return a torch.futures.Future object, but got {kind.__module__}.{kind.__qualname__}"
        )
    return answer  # type: ignore[return-value]  # torch.futures.Future is its Python face


def check_result(name: str, value: object, bucket: Tensor) -> Tensor:
    """``value`` if DDP can take it for the bucket's new content; else TypeError or ValueError."""
    if not isinstance(value, Tensor):
        kind = type(value)
        raise TypeError(
            f"the future of {name} must hold one tensor, but holds {kind.__module__}.{kind.__qualname__}"
        )
    if value.dtype != bucket.dtype:
        raise TypeError(
            f"the future of {name} holds {value.dtype}, but the bucket is {bucket.dtype}; cast the result"
        )
    if value.device != bucket.device:
        raise ValueError(
            f"the future of {name} holds a tensor on {value.device}, but the bucket is on {bucket.device}"
        )
    if value.shape != bucket.shape:
        raise ValueError(
            f"the future of {name} holds a tensor of shape {tuple(value.shape)}, but the bucket's is "
            f"{tuple(bucket.shape)}"
        )
    if value.layout != bucket.layout:
        raise ValueError(f"the future of {name} holds a {value.layout} tensor for a {bucket.layout} bucket")
    return value


def hook_name(hook: Callable[..., Any]) -> str:
    """``module.qualname`` of a function, a partial's function or a callable object's class."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"


def _count_active(active: bool, device: torch.device, group: Group) -> Tensor:
    """How many ranks say that they are active, as a 0-d fp64 tensor."""
    votes = torch.zeros(group.size, dtype=torch.float64, device=device)
    votes[group.rank] = float(active)
    gather(votes.view(torch.uint8).chunk(group.size), group)
    return votes.sum()
