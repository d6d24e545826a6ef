"""Ends the waiting for a user's hook when a peer has failed, died or never answers.

Our own exchanges wait in groups of their own and learn of a failure when those close. A user's hook waits
in a group that we must not touch. So the ranks of a wire that runs such a hook also form a ring in which
nothing is sent but what ranks must agree on: each waits for its successor, and when that one closes, closes
too. A failure goes round the ring in milliseconds, and costs nothing until then.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place, WireError, locate
from gradwire.lanes import in_this_process
from gradwire.peers import (
    ClosedGroup,
    Failure,
    Group,
    Progress,
    StallWatcher,
    Standing,
    open_gloo,
    timeout_of,
)

# A peer that ends normally closes the ring as well, while its last messages may still be on their way.
# One that was killed closes the hook's own connections too, which the hook usually notices by itself.
_GRACE_S = 20.0

Over = concurrent.futures.Future[None]
"""Of something that is said over the ring: done when that is over, whatever has come of it."""


class HookWatchdog:
    """Gives up futures that would otherwise never be completed, and keeps the first failure."""

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._core = core = _Core(group, prefix)
        threads = [
            threading.Thread(target=target, name=f"gradwire-{prefix}", daemon=True)
            for target in (core.watch_ring, core.watch_clock, core.serve_talks)
        ]
        for thread in threads:
            thread.start()
        watch = StallWatcher(core.failure, core.timeout_s, core.look, prefix)
        self._finalizer = weakref.finalize(self, in_this_process(_end), core, threads, watch)

    @property
    def failure(self) -> WireError | None:
        return self._core.failure.error

    def watch(self, future: Future[Tensor], place: Place, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` if ``future`` is not done when the ring breaks or the time is up."""
        self._core.add(future, place, give_up)

    def fail(self, error: WireError) -> None:
        """Give up, on every rank."""
        self._core.fail(error)

    def start_collective(self, talk: Callable[[Group, torch.device], None], place: Place) -> Over:
        """Run ``talk`` over the ring, after those before it; what it raises is a failure."""
        return self._core.start_collective(talk, place)

    def add_reason(self, error: WireError, place: Place, waited_s: float) -> None:
        """Why a hook may have failed: for whom it waited long, or what another rank had failed of before."""
        if waited_s > self._core.timeout_s / 2:  # its own timeout has struck
            error.text += f". {self._core.who(place, timed_out=True)}"
        elif (before := self._core.failure.left_by_peers()) is not None:
            # Who comes late finds the connections of its hook closed, and no more than that.
            error.text += f". Before that another rank had failed: {before}"

    def close(self) -> None:
        self._finalizer()


@dataclass(frozen=True)
class _Wait:
    """One bucket whose hook has been called."""

    since: float
    deadline: float
    place: Place
    give_up: Callable[[], None]


@dataclass(frozen=True)
class _Talk:
    """Something to be said over the ring."""

    run: Callable[[Group, torch.device], None]
    place: Place
    over: Over


class _Core:
    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self.failure = Failure(group, prefix)
        self.timeout_s = timeout_of(group).total_seconds()
        self.ring = open_gloo(group, prefix)
        self.talks: queue.SimpleQueue[_Talk | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: dict[Future[Tensor], _Wait] = {}
        self._broken = self._closed = False
        self._last: tuple[Place | None, float] = None, time.monotonic()

    def look(self) -> Progress:
        with self._changed:
            oldest = min(self._pending.values(), key=lambda wait: wait.since, default=None)
            if oldest is None:
                return Progress(self._last[0], True, self._last[1])
            return Progress(oldest.place, False, oldest.since)

    def add(self, future: Future[Tensor], place: Place, give_up: Callable[[], None]) -> None:
        with self._changed:
            # A failure while the hook was called has given up all there was then, and this was not there.
            has_failed = self.failure.error is not None
            if not has_failed:
                patience = min(_GRACE_S, self.timeout_s) if self._broken else self.timeout_s
                now = time.monotonic()
                self._pending[future] = _Wait(now, now + patience, place, give_up)
                self._changed.notify()
        if has_failed:
            give_up()
        else:
            future.add_done_callback(self._remove)

    def _remove(self, future: Future[Tensor]) -> None:
        with self._changed:
            wait = self._pending.pop(future, None)
            if wait is not None:  # buckets may be done in any order
                place, last = wait.place, self._last[0]
                is_later = last is None or (last.step, last.bucket) < (place.step, place.bucket)
                self._last = place if is_later else last, time.monotonic()

    def fail(self, error: WireError) -> None:
        self.failure.set(error)
        self._give_up()
        self.ring.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.talks.put(None)
        self.ring.close()

    def start_collective(self, talk: Callable[[Group, torch.device], None], place: Place) -> Over:
        over = Over()
        with self._changed:
            if not self._closed:
                self.talks.put(_Talk(talk, place, over))
                return over
        over.set_result(None)
        return over

    def serve_talks(self) -> None:
        while (talk := self.talks.get()) is not None:
            if self.failure.error is None:
                self._run(talk)
            over = talk.over
            # Who waits for it may then drop the model: keep nothing of it.
            del talk
            over.set_result(None)
            del over

    def _run(self, talk: _Talk) -> None:
        try:
            with torch.no_grad():
                talk.run(self.ring, torch.device("cpu"))
        except ClosedGroup as closed:
            if self.failure.error is None and not self._closed:
                self.fail(self.failure.explain(talk.place, closed, self.ring.close))
        except Exception as error:
            self.fail(locate(error, talk.place))

    def watch_ring(self) -> None:
        if self.ring.size == 1:
            return
        with contextlib.suppress(ClosedGroup):
            self.ring.watch((self.ring.rank + 1) % self.ring.size)
        if self._closed:
            return
        error = self.failure.error or self.failure.ask_peers()
        if error is not None:
            self.fail(error)
            return
        with self._changed:
            self._broken = True
            soon = time.monotonic() + min(_GRACE_S, self.timeout_s)
            self._pending = {
                future: replace(wait, deadline=min(wait.deadline, soon))
                for future, wait in self._pending.items()
            }
            self._changed.notify()
        self.ring.close()

    def watch_clock(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                first = min(self._pending.values(), key=lambda wait: wait.deadline, default=None)
                if first is None or (left := first.deadline - time.monotonic()) > 0:
                    self._changed.wait(None if first is None else left)
                    continue
            reason = (
                "a peer left or died while this rank waited for it"
                if self._broken
                else f"the hook's future was not completed within {self.timeout_s:g} s"
            )
            who = self.who(first.place, timed_out=not self._broken)
            self.fail(WireError(f"{first.place}: {reason}. {who}"))

    def who(self, place: Place, *, timed_out: bool) -> str:
        """Who is furthest behind, by what each rank says; whom a hook waits for is not known."""
        if self.failure.board is not None:
            self.failure.board.post_standing(Standing(place.step, place.bucket, timed_out=timed_out))
        return self.failure.name_the_last(timed_out=timed_out)

    def _give_up(self) -> None:
        with self._changed:
            abandoned, self._pending = list(self._pending.values()), {}
        for wait in abandoned:
            wait.give_up()


def _end(core: _Core, threads: list[threading.Thread], watch: StallWatcher) -> None:
    core.failure.settle()
    core.close()
    watch.end()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5)
