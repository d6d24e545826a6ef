"""The runner of a user's hook, which checks the hook's results."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.averaging import LayoutCheck, Pending
from gradwire.ddp.ddp_bucket import DDPBucket
from gradwire.ddp.hook_guard import Completion, HookGuard, NoWatchdog
from gradwire.ddp.hook_info import hook_name, record_runners
from gradwire.ddp.runner import Runner
from gradwire.errors import Place, WireError, locate, original
from gradwire.lanes import CollectiveWork, Promise, completed
from gradwire.telemetry import StatsCollector
from gradwire.torch_private import AnyFuture

# Seconds to wait for the comparison of layouts. Ranks with different layouts must not call the hook, since
# Gloo ends the process when sizes differ. But the wait must end: before another rank reaches this bucket, it
# may need this rank for a collective of the user's.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class _Call:
    """One call of the hook, for one bucket."""

    promise: Promise
    place: Place
    used: list[Runner]
    """The runners that the hook has used."""
    begin: float
    """The time when the hook returned its future."""
    work_s: float
    """The seconds until the hook returned its future."""


class HookRunner:
    """Run a hook, and check its results."""

    runs_inline = False

    def __init__(
        self,
        hook: Callable[..., Any],
        state: object,
        guard: HookGuard | None = None,
        layout_check: LayoutCheck | None = None,
    ) -> None:
        """Run ``hook`` with ``state``.

        Args:
            hook: called with ``(state, bucket)``.
            state: the first argument of the hook.
            guard: keeps failures and runs collective work; None for a hook without a watchdog or such work.
            layout_check: compares new layouts with the other ranks'; None to compare none.
        """
        self.name = hook_name(hook)
        self.stats = StatsCollector()
        self._hook = hook
        self._state = state
        self._guard = guard or NoWatchdog()
        self._layout_check = layout_check
        self._pending: Pending[_Call] = Pending()

    @property
    def failure(self) -> WireError | None:
        return self._guard.failure

    def start(self, bucket: DDPBucket, place: Place) -> Future[Tensor]:
        assert bucket.grad_bucket is not None, "hooks take only DDP's buckets"
        compared = self._compare(bucket, place)
        if self.failure is not None:
            return completed(bucket.flat)
        begin = time.perf_counter()
        with record_runners() as used:
            answer = require_future(self.name, self._hook(self._state, bucket.grad_bucket))
        returned = time.perf_counter()
        call = _Call(Promise(bucket.flat), place, used, returned, returned - begin)
        held = [self]
        finished = threading.Event()

        def take(done: Future[Any]) -> None:
            # A thread of the hook's group runs this. The model and the runner may be gone meanwhile, and this
            # thread must not hold the last reference to its group: a thread that joins itself aborts the
            # process.
            result = held.pop()._check(done, call)
            call.used.clear()
            if compared is None:
                call.promise.keep(result)
            else:
                keep = _on_this_stream(functools.partial(call.promise.keep, result), result)
                compared.add_done_callback(lambda _: keep())
            finished.set()

        self._pending.add(call)
        self._guard.watch(answer, place, call.promise.give_up, finished)
        answer.add_done_callback(take)
        return call.promise.future

    def run_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> None:
        self._guard.start_collective(work, place, device).result()

    def fail(self, error: WireError) -> None:
        self._guard.fail(error)

    def give_up(self) -> None:
        self._pending.give_up()

    def close(self) -> None:
        self._guard.close()

    def _check(self, done: Future[Any], call: _Call) -> Tensor:
        """Return the hook's result; if it is invalid, fail and return the bucket as it was."""
        local = call.promise.flat
        if self.failure is not None:  # nobody waits for it any more
            return local
        # torch would only log an error raised in this callback, and DDP would wait for ever.
        try:
            value = check_result(self.name, done.value(), local)
            for failure in filter(None, (runner.failure for runner in call.used)):
                raise failure
        except Exception as error:
            located = locate(original(error), call.place)
            self.fail(self._guard.explained(located, call.place, time.perf_counter() - call.begin))
            return local
        waited_s = time.perf_counter() - call.begin
        times = (None, None) if local.is_cuda else (waited_s, call.work_s)
        self.stats.record(call.place, None, None, *times)
        return value

    def _compare(self, bucket: DDPBucket, place: Place) -> Completion | None:
        """Compare a new layout with the other ranks'; return its completion if it may be still under way."""
        work = None if self._layout_check is None else self._layout_check.work_for(bucket.layout)
        if work is None:
            return None
        compared = self._guard.start_collective(work, place, bucket.flat.device)
        concurrent.futures.wait([compared], _PATIENCE_S)
        return compared


def _on_this_stream(call: Callable[[], None], result: Tensor) -> Callable[[], None]:
    """Return ``call`` for any thread: it uses the stream that is current now on the device of ``result``."""
    if not result.is_cuda:
        return call
    stream = torch.cuda.current_stream(result.device)

    def call_there() -> None:
        with torch.cuda.stream(stream):
            call()

    return call_there


def require_future(name: str, answer: object) -> Future[Any]:
    """Return ``answer`` if it is a future; otherwise raise TypeError."""
    if not isinstance(answer, AnyFuture):
        kind = type(answer)
        raise TypeError(
            f"{name} must return a torch.futures.Future object, but got {kind.__module__}.{kind.__qualname__}"
        )
    return answer  # type: ignore[return-value]  # torch.futures.Future derives from it


def check_result(name: str, value: object, bucket: Tensor, *, is_copied: bool = False) -> Tensor:
    """Return ``value`` if it fits the bucket; otherwise raise TypeError or ValueError.

    With ``is_copied`` the caller copies it to the bucket, so dtype and device may differ.
    """
    if not isinstance(value, Tensor):
        kind = type(value)
        raise TypeError(
            f"the future of {name} must hold one tensor, but holds {kind.__module__}.{kind.__qualname__}"
        )
    if value.dtype != bucket.dtype and not is_copied:
        raise TypeError(
            f"the future of {name} holds {value.dtype}, but the bucket is {bucket.dtype}; cast the result"
        )
    if value.device != bucket.device and not is_copied:
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
