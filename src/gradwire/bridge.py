"""Between DDP's reducer and whatever averages a bucket: a recipe of ours or a hook of the user's."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future

from gradwire.errors import Place, WireError, locate, original
from gradwire.exchanges import Scratch, average_sparse
from gradwire.execution import Lane, Task
from gradwire.guard import Guard
from gradwire.layout import Layouts
from gradwire.ops import Scale
from gradwire.recipes import Recipe
from gradwire.stats import StatsBook
from gradwire.transport import Group, Traffic


class Runner(Protocol):
    """Averages buckets, and remembers the first failure of any rank."""

    name: str
    stats: StatsBook

    @property
    def failure(self) -> WireError | None: ...

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        """Begin to average; ``shadow`` says that ``join()`` feeds zeros for a rank without input."""
        ...

    def fail(self, error: WireError) -> WireError: ...

    def close(self) -> None: ...


class Bridge:
    """Takes buckets from one model's reducer to a runner, and errors back to ``backward()``.

    Note [How an error leaves a hook]: an exception set on the future reaches the user as a failed cast,
    and one raised inside the hook leaves DDP unable to run its next step. So the future is completed with
    the local gradients, and the error is raised by a callback of the autograd engine. DDP queues its own
    callback right after the last bucket's hook; ours, queued in that hook, queues a second one, which
    therefore runs when DDP has finished. Outside a backward pass (``join()``) there are no callbacks, and
    the hook itself waits and raises.
    """

    def __init__(self, runner: Runner, rank: int) -> None:
        self.runner = runner
        self.num_steps = 0
        self._rank = rank

    def run(self, bucket: GradBucket) -> Future[Tensor]:
        """What DDP calls, once per bucket and in bucket order."""
        if bucket.index() == 0:
            self.num_steps += 1
        place = Place(self._rank, self.num_steps - 1, bucket.index(), self.runner.name)
        in_backward = torch._C._current_graph_task_id() != -1
        local = bucket.buffer()  # before the hook, which may set another one
        try:
            if self.runner.failure is None:
                future = self.runner.start(bucket, place, shadow=not in_backward)
            else:
                future = completed(local)
        except Exception as error:
            self.runner.fail(locate(error, place))
            future = completed(local)
        if not in_backward:
            future.wait()
            self.raise_failure()
        elif bucket.is_last():
            queue = Variable._execution_engine.queue_callback
            queue(functools.partial(queue, self.raise_failure))
        return future

    def raise_failure(self) -> None:
        """Raise the first failure of any rank, if there is one."""
        if self.runner.failure is not None:
            raise self.runner.failure.with_traceback(None)


class RecipeRunner:
    """Averages buckets with a recipe, on a lane."""

    def __init__(
        self,
        recipe: Recipe,
        lane: Lane,
        layouts: Layouts | None = None,
        divide_by_active: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = str(recipe)
        self.stats = StatsBook()
        self._recipe = recipe
        self._lane = lane
        self._layouts = layouts
        self._divide_by_active = divide_by_active

    @property
    def failure(self) -> WireError | None:
        return self._lane.failure

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        if self._layouts is not None:
            self._layouts.of(bucket)
        if not self._recipe.exchange.communicates:
            self.stats.record(place, 0, 0, 0.0, 0.0)
            return completed(bucket.buffer())
        active = None
        if self._divide_by_active():
            active = torch.tensor(float(not shadow), device=bucket.buffer().device)
        run = functools.partial(self._average, active)
        return self._lane.submit(Task(bucket.buffer(), run, place, self._record))

    def _average(self, active: Tensor | None, flat: Tensor, group: Group, scratch: Scratch) -> Tensor:
        scale: Scale = 1.0 if self._recipe.reduction == "sum" else 1 / group.size
        if active is not None and self._recipe.reduction == "mean":
            scale = 1 / _count_active(active.to(flat.device), group)
        if flat.is_sparse:
            return average_sparse(flat, group, scale)
        self._recipe.exchange.run(flat, group, scratch, scale)
        return flat

    def _record(self, place: Place, traffic: Traffic, elapsed_s: float | None) -> None:
        wait_s = None if elapsed_s is None else traffic.wait_s
        work_s = None if elapsed_s is None else elapsed_s - traffic.wait_s
        self.stats.record(place, traffic.bytes_sent, traffic.num_messages, wait_s, work_s)

    def fail(self, error: WireError) -> WireError:
        return self._lane.fail(error)

    def close(self) -> None:
        self._lane.close()


class HookRunner:
    """Runs a hook of the user's or of torch's, and checks what it returns."""

    def __init__(self, hook: Callable[..., Any], state: object, guard: Guard | None) -> None:
        self.name = hook_name(hook)
        self.stats = StatsBook()
        self._hook = hook
        self._state = state
        self._guard = guard
        self._failure: WireError | None = None

    @property
    def failure(self) -> WireError | None:
        return self._guard.failure if self._guard is not None else self._failure

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        local, begin = bucket.buffer(), time.perf_counter()
        answer = self._hook(self._state, bucket)
        called = time.perf_counter()
        if not isinstance(answer, torch._C.Future):
            kind = type(answer)
            raise TypeError(
                f"{self.name} must return a torch.futures.Future object, but got "
                f"{kind.__module__}.{kind.__qualname__}"
            )

        def result(done: Future[Any]) -> Tensor:
            try:
                value = check_result(self.name, done.value(), local)
            except Exception as error:
                self.fail(locate(original(error), place))
                return local
            wait_s = None if local.is_cuda else time.perf_counter() - called
            work_s = None if local.is_cuda else called - begin
            self.stats.record(place, None, None, wait_s, work_s)
            return value

        if self._guard is None:
            return cast("Future[Tensor]", answer.then(result))
        return self._guarded(cast("Future[Any]", answer), result, place, local)

    def _guarded(
        self,
        answer: Future[Any],
        result: Callable[[Future[Any]], Tensor],
        place: Place,
        local: Tensor,
    ) -> Future[Tensor]:
        outer: Future[Tensor] = Future()
        lock = threading.Lock()

        def settle(value: Tensor) -> None:
            with lock:
                if not outer.done():
                    outer.set_result(value)

        assert self._guard is not None
        self._guard.watch(answer, place, lambda: settle(local))
        answer.add_done_callback(lambda done: settle(result(done)))
        return outer

    def fail(self, error: WireError) -> WireError:
        if self._guard is not None:
            return self._guard.fail(error)
        self._failure = self._failure or error
        return self._failure

    def close(self) -> None:
        if self._guard is not None:
            self._guard.close()


def completed(value: Tensor) -> Future[Tensor]:
    """A future that holds ``value`` already."""
    future: Future[Tensor] = Future(devices=[value.device]) if value.is_cuda else Future()
    future.set_result(value)
    return future


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


def _count_active(active: Tensor, group: Group) -> Tensor:
    """How many ranks say 1, as a 0-d tensor."""
    votes = torch.zeros(group.size, dtype=active.dtype, device=active.device)
    votes[group.rank] = active
    rows = list(votes.view(torch.uint8).chunk(group.size))
    messages = group.post(rows)
    for peer in range(group.size):
        if peer != group.rank:
            messages.send(peer, rows[group.rank])
    messages.finish()
    return votes.sum()
