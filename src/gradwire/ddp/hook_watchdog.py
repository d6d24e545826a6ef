"""The watchdog of a user's hook, which ends the waiting when a peer has failed, died or never answers.

Our own exchanges wait in groups of their own and learn of a failure when those close. A user's hook waits in
a group that we must not touch. So the ranks of a wire that runs such a hook also form a ring. Each rank waits
for its successor there, and closes when that one closes: a failure goes round the ring in milliseconds.
Nothing is sent over the ring except what ranks must agree on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place, WireError, locate
from gradwire.lanes import CollectiveWork, end_with, join_threads
from gradwire.peers import (
    Failure,
    PeerUnreachable,
    Progress,
    RankStatus,
    StallWatcher,
    open_gloo,
    timeout_of,
)

# A peer that ends normally closes the ring as well, while its last messages may still be on their way.
# One that was killed closes the hook's own connections too, which the hook usually notices by itself.
_GRACE_S = 20.0

Over = concurrent.futures.Future[None]
"""The end of a collective over the ring: done when that is over, however it ended."""


class HookWatchdog:
    """Gives up futures that would otherwise never be completed, and keeps the first failure."""

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._ring = ring = _Ring(group, prefix)
        threads = [
            threading.Thread(target=target, name=f"gradwire-{prefix}", daemon=True)
            for target in (ring.watch_peers, ring.watch_clock, ring.serve_collectives)
        ]
        for thread in threads:
            thread.start()
        watcher = StallWatcher(ring.failure, ring.timeout_s, ring.look, prefix)
        self._finalizer = end_with(self, _end, ring, threads, watcher)

    @property
    def failure(self) -> WireError | None:
        return self._ring.failure.error

    def watch(self, future: Future[Tensor], place: Place, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` if ``future`` is not done when the ring breaks or the time is up."""
        self._ring.add(future, place, give_up)

    def fail(self, error: WireError) -> None:
        """Give up, on every rank."""
        self._ring.fail(error)

    def start_collective(self, work: CollectiveWork, place: Place) -> Over:
        """Run ``work`` over the ring, after those before it; what it raises is a failure."""
        return self._ring.start_collective(work, place)

    def add_reason(self, error: WireError, place: Place, waited_s: float) -> None:
        """Add why a hook may have failed: for whom it waited long, or what failed on another rank before."""
        if waited_s > self._ring.timeout_s / 2:  # its own timeout has struck
            error.text += f". {self._ring.who(place, timed_out=True)}"
        elif (before := self._ring.failure.posted_text()) is not None:
            # Who comes late finds the connections of its hook closed, and no more than that.
            error.text += f". Before that another rank had failed: {before}"

    def close(self) -> None:
        self._finalizer()


@dataclass(frozen=True)
class _Wait:
    """The wait for one bucket whose hook has been called."""

    since: float
    deadline: float
    place: Place
    give_up: Callable[[], None]


@dataclass(frozen=True)
class _Collective:
    """Messages to exchange over the ring."""

    run: CollectiveWork
    place: Place
    over: Over


class _Ring:
    """The ranks in a ring, the calls that wait, and the collectives to run."""

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self.failure = Failure(group, prefix)
        self.timeout_s = timeout_of(group).total_seconds()
        self.group = open_gloo(group, prefix)
        self.collectives: queue.SimpleQueue[_Collective | None] = queue.SimpleQueue()
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
        self.group.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.collectives.put(None)
        self.group.close()

    def start_collective(self, work: CollectiveWork, place: Place) -> Over:
        over = Over()
        with self._changed:
            if not self._closed:
                self.collectives.put(_Collective(work, place, over))
                return over
        over.set_result(None)
        return over

    def serve_collectives(self) -> None:
        while (collective := self.collectives.get()) is not None:
            if self.failure.error is None:
                self._run(collective)
            over = collective.over
            # Whoever waits for it may then drop the model: keep nothing of it.
            del collective
            over.set_result(None)
            del over

    def _run(self, collective: _Collective) -> None:
        try:
            with torch.no_grad():
                collective.run(self.group, torch.device("cpu"))
        except PeerUnreachable as closed:
            if self.failure.error is None and not self._closed:
                self.fail(self.failure.explain(collective.place, closed, self.group.close))
        except Exception as error:
            self.fail(locate(error, collective.place))

    def watch_peers(self) -> None:
        if self.group.size == 1:
            return
        with contextlib.suppress(PeerUnreachable):
            self.group.watch((self.group.rank + 1) % self.group.size)
        if self._closed:
            return
        error = self.failure.error or self.failure.wait_for_peer_error()
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
        self.group.close()

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
        """Say who is furthest behind, by what each rank says; whom a hook waits for is not known."""
        if self.failure.store is not None:
            self.failure.store.post_status(RankStatus(place.step, place.bucket, timed_out=timed_out))
        return self.failure.describe_furthest_behind(timed_out=timed_out)

    def _give_up(self) -> None:
        with self._changed:
            abandoned, self._pending = list(self._pending.values()), {}
        for wait in abandoned:
            wait.give_up()


def _end(ring: _Ring, threads: list[threading.Thread], watcher: StallWatcher) -> None:
    ring.failure.wait_until_posted()
    ring.close()
    watcher.end()
    join_threads(threads)
