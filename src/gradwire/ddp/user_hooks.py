"""A hook of the user's as a runner, with what it returns checked."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradwire.averaging import CollectiveWork, Runner, completed
from gradwire.buckets import BucketLayout, Layouts
from gradwire.ddp.hook_watchdog import HookWatchdog, Over
from gradwire.errors import Place, WireError, locate, original
from gradwire.lanes import future_for
from gradwire.peers import Group, require_same
from gradwire.recipes import fingerprint
from gradwire.telemetry import StatsBook

# Ranks whose layouts differ must not call the hook: Gloo ends the process when sizes do. So they wait for one
# another, but not for ever: before a rank's bucket may stand a collective of the user's own with this rank.
_PATIENCE_S = 2.0


class HookRunner:
    """Runs a hook of the user's or of torch's, and checks what it returns."""

    runs_at_once = False

    def __init__(
        self,
        hook: Callable[..., Any],
        state: object,
        guard: HookWatchdog | None,
        layouts: Layouts | None = None,
        peers: Group | None = None,
    ) -> None:
        """Without a guard, nobody ends the waiting for peers that have failed.

        With one, new ``layouts`` are compared with the other ranks' over its ring; without, over ``peers``.
        """
        self.name = hook_name(hook)
        self.stats = StatsBook()
        self._hook = hook
        self._state = state
        self._guard = guard
        self._layouts = layouts
        self._peers = peers
        self._agreed: dict[int, BucketLayout] = {}
        self._failure: WireError | None = None
        self._give_up: list[Callable[[], None]] = []

    @property
    def failure(self) -> WireError | None:
        return self._failure if self._guard is None else self._guard.failure

    def start(self, bucket: GradBucket, place: Place, *, shadow: bool) -> Future[Tensor]:
        local = bucket.buffer()
        compared = self._compare(bucket, place)
        if self.failure is not None:
            return completed(local)
        begin = time.perf_counter()
        with _noting() as used:
            answer = require_future(self.name, self._hook(self._state, bucket))
        work_s, called = time.perf_counter() - begin, time.perf_counter()
        outer, lock = future_for(local), threading.Lock()

        def settle(value: Tensor) -> None:
            with lock:
                if not outer.done():
                    outer.set_result(value)

        held = [self]

        def take(done: Future[Any]) -> None:
            # A thread of the hook's group runs this, and may still be here when the model and the runner are
            # gone. It must not be the one to drop the group: a thread that joins itself aborts the process.
            value = held.pop()._check(done, local, place, used, called, work_s)
            used.clear()
            if compared is None:
                settle(value)
            else:
                compared.add_done_callback(lambda _: settle(value))

        def give_up() -> None:
            settle(local)

        if place.bucket == 0:
            self._give_up.clear()
        self._give_up.append(give_up)
        if self._guard is not None:
            self._guard.watch(answer, place, give_up)
        answer.add_done_callback(take)
        return outer

    def _check(
        self,
        done: Future[Any],
        local: Tensor,
        place: Place,
        used: list[Runner],
        called: float,
        work_s: float,
    ) -> Tensor:
        """What the hook has made of a bucket, or the bucket as it was, and the wire has failed."""
        # torch would only log what is raised here, and DDP would wait for ever.
        try:
            value = check_result(self.name, done.value(), local)
            for failure in filter(None, (runner.failure for runner in used)):
                raise failure
        except Exception as error:
            located = locate(original(error), place)
            if self._guard is not None:
                self._guard.add_reason(located, place, time.perf_counter() - called)
            self.fail(located)
            return local
        waited_s = time.perf_counter() - called
        times = (None, None) if local.is_cuda else (waited_s, work_s)
        self.stats.record(place, None, None, *times)
        return value

    def _compare(self, bucket: GradBucket, place: Place) -> Over | None:
        """Compare a layout that is new with the other ranks'; when that is over, unless it is already."""
        if self._layouts is None:
            return None
        layout = self._layouts.of(bucket)
        if self._agreed.get(layout.index) == layout:
            return None
        self._agreed[layout.index] = layout
        talk = functools.partial(require_same, fingerprint.of_bucket(layout))
        if self._guard is None:
            if self._peers is not None:
                self.run_collective(talk, place, bucket.buffer().device)
            return None
        compared = self._guard.start_collective(talk, place)
        concurrent.futures.wait([compared], _PATIENCE_S)
        return compared

    def run_collective(self, talk: CollectiveWork, place: Place, device: torch.device) -> None:
        if self._guard is not None:
            self._guard.start_collective(talk, place).result()
            return
        assert self._peers is not None
        try:
            talk(self._peers, device)
        except Exception as error:
            self.fail(locate(error, place))

    def fail(self, error: WireError) -> None:
        if self._guard is None:
            self._failure = self._failure or error
        else:
            self._guard.fail(error)

    def abandon(self) -> None:
        for give_up in self._give_up:
            give_up()

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


def require_future(name: str, answer: object) -> Future[Any]:
    """``answer`` if it is what a hook must return; else TypeError."""
    if not isinstance(answer, torch._C.Future):
        kind = type(answer)
        raise TypeError(
            f"{name} must return a torch.futures.Future object, but got {kind.__module__}.{kind.__qualname__}"
        )
    return answer  # type: ignore[return-value]  # torch.futures.Future is its Python face


def check_result(name: str, value: object, bucket: Tensor, *, is_copied: bool = False) -> Tensor:
    """``value`` if it can be the bucket's new content; else TypeError or ValueError.

    If it ``is_copied`` to the bucket, dtype and device may be others.
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


def hook_name(hook: Callable[..., Any]) -> str:
    """``module.qualname`` of a function, a partial's function or a callable object's class.

    Of what has no module, as functions made by ``exec``, the name alone.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return ".".join(filter(None, (named.__module__, named.__qualname__)))
