"""Tells the other ranks where this one stands when it has made no progress for long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gradwire.errors import Place
from gradwire.peers.failure import Failure
from gradwire.peers.failure_store import Standing
from gradwire.peers.main_thread import describe_main_thread

log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Progress:
    """The bucket a lane is at, or, if that is done, the last one; and since when."""

    place: Place | None
    is_done: bool
    since: float
    waits_for: int | None = None

    @property
    def standing(self) -> Standing:
        if self.place is None:
            return Standing(-1, -1, is_done=True)
        return Standing(self.place.step, self.place.bucket, self.is_done, self.waits_for)


class StallWatcher:
    """A thread that looks at a lane a few times in each timeout of the group, and mostly finds it well.

    After half the timeout without progress it posts where this rank stands, and what its main thread does
    instead; after three quarters inside a bucket it logs that, and why, as far as others have told: NCCL
    may end the process at the timeout.
    """

    def __init__(self, failure: Failure, timeout_s: float, look: Callable[[], Progress], name: str) -> None:
        self._failure = failure
        self._timeout_s = timeout_s
        self._look = look
        self._ended = threading.Event()
        self._posted: Standing | None = None
        self._logged = False
        self._thread = threading.Thread(target=self._serve, name=f"gradwire-watch-{name}", daemon=True)
        if failure.store is not None:
            self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _serve(self) -> None:
        while not self._ended.wait(self._timeout_s / 16):
            if self._failure.error is None:
                self._act(self._look())

    def _act(self, progress: Progress) -> None:
        store = self._failure.store
        assert store is not None
        stalled_s = time.monotonic() - progress.since
        if stalled_s < self._timeout_s / 2:
            if self._posted is not None:
                store.withdraw_standing()
            self._posted, self._logged = None, False
            return
        standing = progress.standing
        if progress.is_done:  # what keeps this rank is the user's own code
            standing = replace(standing, doing=describe_main_thread())
        if self._posted != standing:
            self._posted = standing
            store.post_standing(standing)
        if not progress.is_done and not self._logged and stalled_s > 0.75 * self._timeout_s:
            self._logged = True
            why = store.failure() or self._failure.name_the_last(progress.waits_for, timed_out=True)
            log.error("%s: no progress for %.0f s. %s", progress.place, stalled_s, why)
