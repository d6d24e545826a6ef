"""A watcher that posts this rank's status for the other ranks when its lane makes no progress."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gradwire.errors import Place
from gradwire.peers.failure import Failure
from gradwire.peers.failure_store import RankStatus
from gradwire.peers.main_thread import describe_main_thread

log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Progress:
    """The bucket that a lane averages or, if ``is_done``, the last one it has averaged."""

    place: Place | None
    """None before the first bucket."""
    is_done: bool
    since: float
    """The ``time.monotonic()`` at which the lane got there."""
    waits_for: int | None = None
    """The rank whose message the lane waits for."""

    @property
    def status(self) -> RankStatus:
        """The status to post for the other ranks."""
        if self.place is None:
            return RankStatus(-1, -1, is_done=True)
        return RankStatus(self.place.step, self.place.bucket, self.is_done, self.waits_for)


class StallWatcher:
    """A thread that looks at a lane's progress sixteen times in each timeout of the group.

    After half the timeout without progress, it posts this rank's status and what the main thread does.
    After three quarters inside a bucket, it also logs the stall and its cause, as far as other ranks have
    posted it. It must not wait longer: NCCL may end the process at the timeout.
    """

    def __init__(self, failure: Failure, timeout_s: float, look: Callable[[], Progress], name: str) -> None:
        """Watch what ``look`` returns; if ``failure`` is not shared with other ranks, do nothing."""
        self._failure = failure
        self._timeout_s = timeout_s
        self._look = look
        self._ended = threading.Event()
        self._posted: RankStatus | None = None
        self._logged = False
        self._thread = threading.Thread(target=self._serve, name=f"gradwire-stalls-{name}", daemon=True)
        if failure.store is not None:
            self._thread.start()

    def end(self) -> None:
        """End the thread, and wait for it for up to five seconds."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _serve(self) -> None:
        while not self._ended.wait(self._timeout_s / 16):
            if self._failure.error is None:
                self._act(self._look())

    def _act(self, progress: Progress) -> None:
        """Post, withdraw or log as the time without progress demands."""
        store = self._failure.store
        assert store is not None
        stalled_s = time.monotonic() - progress.since
        if stalled_s < self._timeout_s / 2:
            if self._posted is not None:
                store.withdraw_status()
            self._posted, self._logged = None, False
            return
        status = progress.status
        if progress.is_done:  # between buckets, the user's own code is what takes so long
            status = replace(status, doing=describe_main_thread())
        if self._posted != status:
            self._posted = status
            store.post_status(status)
        if not progress.is_done and not self._logged and stalled_s > 0.75 * self._timeout_s:
            self._logged = True
            why = store.failure() or self._failure.describe_furthest_behind(
                progress.waits_for, timed_out=True
            )
            log.error("%s: no progress for %.0f s. %s", progress.place, stalled_s, why)
