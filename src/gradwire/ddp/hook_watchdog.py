"""The watchdog of a user's hook, which ends the wait for a peer that has failed, died or never answers.

Our own exchanges wait in their own groups, and learn of a failure when those close. A user's hook waits in a
group that we must not touch. So the ranks that run such a hook also form a ring. Each rank waits for its
successor there, and closes when the successor closes: a failure goes round the ring in milliseconds. Only
messages on which ranks must agree are sent over the ring.
"""

from __future__ import annotations

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

from gradwire.ddp.hook_guard import Completion
from gradwire.ddp.pending_calls import note_call, note_failure
from gradwire.errors import Place, WireError, locate
from gradwire.lanes import CollectiveWork, is_exiting, join_threads, register_finalizer
from gradwire.peers import (
    Failure,
    PeerUnreachable,
    Progress,
    RankStatus,
    StallWatcher,
    is_unreachable,
    open_gloo,
    timeout_of,
)

# Seconds to wait after the ring has closed without a known failure. A peer that ends normally closes the ring
# too, while its last messages may still travel. If a peer was killed, the hook usually notices by itself.
_GRACE_S = 20.0


class HookWatchdog:
    """Give up futures that would never be completed, and keep the first failure."""

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._ring = ring = _Ring(group, prefix)
        threads = [
            threading.Thread(target=target, name=f"gradwire-{prefix}", daemon=True)
            for target in (ring.watch_peers, ring.watch_clock, ring.serve_collectives)
        ]
        for thread in threads:
            thread.start()
        watcher = StallWatcher(ring.failure, ring.timeout_s, ring.look, prefix)
        self._finalizer = register_finalizer(self, _end, ring, threads, watcher)

    @property
    def failure(self) -> WireError | None:
        return self._ring.failure.error

    def watch(
        self, future: Future[Tensor], place: Place, give_up: Callable[[], None], finished: threading.Event
    ) -> None:
        """Call ``give_up`` if ``future`` is not done when the ring breaks or the time is up."""
        self._ring.add(future, place, give_up, finished)

    def fail(self, error: WireError) -> None:
        """Fail with ``error``, on every rank."""
        self._ring.fail(error)

    def start_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> Completion:
        """Run ``work`` over the ring, with tensors on CPU; an error in it is a failure."""
        return self._ring.start_collective(work, place)

    def explained(self, error: WireError, place: Place, waited_s: float) -> WireError:
        """Return ``error`` with the rank that the hook waited for, or another rank's failure behind it."""
        if waited_s > self._ring.timeout_s / 2:  # the hook's own timeout has probably expired
            error.text += f". {self._ring.describe_slowest(place, timed_out=True)}"
        elif is_unreachable(error):
            # A late rank finds only that the connections of its hook are closed, not why.
            if (found := self._ring.failure.wait_for_peer_error()) is not None:
                return found
            self._ring.group.close()  # which makes the others say that they are there
            error.text += f". {self._ring.describe_slowest(place, timed_out=False)}"
        elif (before := self._ring.failure.posted_text()) is not None:
            error.text += f". Before that another rank had failed: {before}"
        return error

    def close(self) -> None:
        self._finalizer()


@dataclass(frozen=True)
class _WatchedFuture:
    """The wait for the future of one hook call; times are by ``time.monotonic()``."""

    since: float
    deadline: float
    place: Place
    give_up: Callable[[], None]


@dataclass(frozen=True)
class _Collective:
    """Collective work to run over the ring."""

    run: CollectiveWork
    place: Place
    completion: Completion


class _Ring:
    """The connections of the ring, the futures to watch, and the collectives to run."""

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self.failure = Failure(group, prefix)
        self.timeout_s = timeout_of(group).total_seconds()
        self.group = open_gloo(group, prefix)
        self._users_group = weakref.ref(group)
        self.collectives: queue.SimpleQueue[_Collective | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: dict[Future[Tensor], _WatchedFuture] = {}
        self._broken = self._closed = False
        self._last: tuple[Place | None, float] = None, time.monotonic()

    def look(self) -> Progress:
        with self._changed:
            oldest = min(self._pending.values(), key=lambda watched: watched.since, default=None)
            if oldest is None:
                return Progress(self._last[0], True, self._last[1])
            return Progress(oldest.place, False, oldest.since)

    def add(
        self, future: Future[Tensor], place: Place, give_up: Callable[[], None], finished: threading.Event
    ) -> None:
        note_call(self._users_group, finished)
        with self._changed:
            # If the ring failed while the hook ran, this future was not yet watched: give it up here.
            has_failed = self.failure.error is not None
            if not has_failed:
                patience = min(_GRACE_S, self.timeout_s) if self._broken else self.timeout_s
                now = time.monotonic()
                self._pending[future] = _WatchedFuture(now, now + patience, place, give_up)
                self._changed.notify()
        if has_failed:
            give_up()
        else:
            future.add_done_callback(self._remove)

    def _remove(self, future: Future[Tensor]) -> None:
        with self._changed:
            watched = self._pending.pop(future, None)
            if watched is not None:  # buckets may finish in any order
                place, last = watched.place, self._last[0]
                is_later = last is None or (last.step, last.bucket) < (place.step, place.bucket)
                self._last = place if is_later else last, time.monotonic()

    def fail(self, error: WireError) -> None:
        note_failure()
        self.failure.set(error)
        self._give_up()
        self.group.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.collectives.put(None)
        self.group.close()

    def start_collective(self, work: CollectiveWork, place: Place) -> Completion:
        completion = Completion()
        with self._changed:
            if not self._closed:
                self.collectives.put(_Collective(work, place, completion))
                return completion
        completion.set_result(None)
        return completion

    def serve_collectives(self) -> None:
        while (collective := self.collectives.get()) is not None:
            if self.failure.error is None:
                self._run(collective)
            completion = collective.completion
            # Whoever waits for it may then drop the model. Hold no reference to it.
            del collective
            completion.set_result(None)
            del completion

    def _run(self, collective: _Collective) -> None:
        try:
            with torch.no_grad():
                collective.run(self.group, torch.device("cpu"))
        except PeerUnreachable as closed:
            if self.failure.error is None and not self._closed:
                if closed.peer == self.group.rank:  # `watch_peers` has passed on that another one is closed
                    closed = PeerUnreachable(None, "a connection was closed")
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
        # Tell the others that this rank is there, before they look who is not.
        if (store := self.failure.store) is not None:
            status, posted = self.look().status, store.status(store.rank)
            if posted is None or posted.order != status.order:  # one that stands still has said more
                store.post_status(status)
        self.group.close()
        error = self.failure.error or self.failure.wait_for_peer_error()
        if error is not None:
            self.fail(error)
            return
        with self._changed:
            self._broken = True
            soon = time.monotonic() + min(_GRACE_S, self.timeout_s)
            self._pending = {
                future: replace(watched, deadline=min(watched.deadline, soon))
                for future, watched in self._pending.items()
            }
            self._changed.notify()

    def watch_clock(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                first = min(self._pending.values(), key=lambda watched: watched.deadline, default=None)
                if first is None or (left := first.deadline - time.monotonic()) > 0:
                    self._changed.wait(None if first is None else left)
                    continue
            reason = (
                "a peer left or died while this rank waited for it"
                if self._broken
                else f"the hook's future was not completed within {self.timeout_s:g} s"
            )
            who = self.describe_slowest(first.place, timed_out=not self._broken)
            self.fail(WireError(f"{first.place}: {reason}. {who}"))

    def describe_slowest(self, place: Place, *, timed_out: bool) -> str:
        """Name the rank that is furthest behind by its own account; a hook does not tell whom it awaits."""
        if self.failure.store is not None:
            self.failure.store.post_status(RankStatus(place.step, place.bucket, timed_out=timed_out))
        return self.failure.describe_furthest_behind(timed_out=timed_out)

    def _give_up(self) -> None:
        with self._changed:
            abandoned, self._pending = self._pending, {}
        for watched in abandoned.values():
            watched.give_up()


def _end(ring: _Ring, threads: list[threading.Thread], watcher: StallWatcher) -> None:
    ring.failure.wait_until_posted()
    ring.close()
    if is_exiting():
        ring.failure.wait_until_known()
    watcher.end()
    join_threads(threads)
