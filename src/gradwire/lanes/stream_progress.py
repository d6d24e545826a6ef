"""The progress of a device along a stream, read without waiting for the device."""

from __future__ import annotations

import collections
import contextlib
import time
from dataclasses import dataclass

import torch

from gradwire.errors import Place
from gradwire.peers import Progress


@dataclass(frozen=True)
class StreamMark:
    """The end of a bucket's exchange on a stream."""

    place: Place
    end: torch.cuda.Event
    device: torch.device
    since: float
    """The time when the exchange was enqueued, by ``time.monotonic()``."""

    def is_done(self) -> bool:
        # The device is set because a new thread has device 0, and a query would create a CUDA context there.
        # After a device error every query raises; then nothing counts as done.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            return bool(self.end.query())
        return False


class StreamProgress:
    """The latest buckets of a lane, in order; the stall watcher holds this instead of the lane."""

    def __init__(self, patience_s: float) -> None:
        """Query no event until ``patience_s`` after the last bucket: a CUDA graph may be captured before."""
        self._patience_s = patience_s
        self._begin = time.monotonic()
        # Bounded: host and device are rarely more than a step apart, and only the oldest open bucket matters.
        self._marks: collections.deque[StreamMark] = collections.deque(maxlen=256)
        self.running: tuple[Place, float] | None = None
        """The bucket that the host enqueues, and since when; some exchanges make the host wait."""

    def add(self, mark: StreamMark) -> None:
        self._marks.append(mark)

    def look(self) -> Progress:
        """Return the oldest bucket that the device or the host has not finished; otherwise the last one."""
        last = self._marks[-1] if self._marks else None
        if last is not None and time.monotonic() - last.since >= self._patience_s:
            for mark in list(self._marks):
                if not mark.is_done():
                    return Progress(mark.place, False, mark.since)
        if self.running is not None:
            place, since = self.running
            return Progress(place, False, since)
        return Progress(None, True, self._begin) if last is None else Progress(last.place, True, last.since)
