"""The progress of a device along a stream, seen without making it wait."""

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
    """The end of a bucket's exchange on a stream, and when it was enqueued."""

    place: Place
    end: torch.cuda.Event
    device: torch.device
    since: float

    def is_done(self) -> bool:
        # A thread's device is 0, and a query would make a context there. After an error of the device
        # every query raises, and nothing is known to be done any more.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            return bool(self.end.query())
        return False


class StreamProgress:
    """The buckets of a lane, in order; the stall watcher holds this, and not the lane."""

    def __init__(self, patience_s: float) -> None:
        """Leave the device alone for ``patience_s`` after each bucket: a graph may be captured meanwhile."""
        self._patience_s = patience_s
        self._begin = time.monotonic()
        # Host and device are rarely more than a step apart; the oldest that is not done is what counts.
        self._marks: collections.deque[StreamMark] = collections.deque(maxlen=256)
        self.running: tuple[Place, float] | None = None
        """The bucket that the host is at, and since when: some exchanges wait for the device or a peer."""

    def add(self, mark: StreamMark) -> None:
        self._marks.append(mark)

    def look(self) -> Progress:
        """Return the oldest bucket that the device, or else the host, has not finished; or the last one."""
        last = self._marks[-1] if self._marks else None
        if last is not None and time.monotonic() - last.since >= self._patience_s:
            for mark in list(self._marks):
                if not mark.is_done():
                    return Progress(mark.place, False, mark.since)
        if self.running is not None:
            place, since = self.running
            return Progress(place, False, since)
        return Progress(None, True, self._begin) if last is None else Progress(last.place, True, last.since)
