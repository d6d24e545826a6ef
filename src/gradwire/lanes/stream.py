"""A lane on a CUDA side stream."""

from __future__ import annotations

import logging
import time
import weakref
from datetime import timedelta

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import WireError, locate
from gradwire.exchanges import Scratch
from gradwire.lanes.stream_progress import StreamMark, StreamProgress
from gradwire.lanes.task import Task, future_for, in_this_process
from gradwire.peers import Alone, Failure, NcclGroup, StallWatcher

log = logging.getLogger("gradwire")


class StreamLane:
    """A side stream per device: work is enqueued in order and the host never waits."""

    shares_messages = True
    runs_at_once = True

    def __init__(self, group: NcclGroup | Alone, failure: Failure, timeout: timedelta) -> None:
        self._group = group
        self._failure = failure
        self._scratch = Scratch()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._marks = StreamProgress(timeout.total_seconds() / 2)
        watch = StallWatcher(failure, timeout.total_seconds(), self._marks.look, "stream")
        self._finalizer = weakref.finalize(self, in_this_process(watch.end))

    @property
    def failure(self) -> WireError | None:
        return self._failure.error

    def submit(self, task: Task) -> Future[Tensor]:
        device = task.flat.device
        future = future_for(task.flat)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            before = self._group.traffic.copy()
            result = task.flat
            if self.failure is None:  # after one, ranks may disagree about what to send
                self._marks.running = task.place, time.monotonic()
                try:
                    result = task.run(task.flat, self._group, self._scratch)
                except Exception as error:
                    self.fail(locate(error, task.place))
                self._marks.running = None
                self._marks.add(StreamMark(task.place, stream.record_event(), device, time.monotonic()))
            task.report(task.place, self._group.traffic.since(before), None)
            # Completed under the side stream, the future makes whoever reads it wait for that stream.
            future.set_result(result)
        return future

    def fail(self, error: WireError) -> None:
        if self.failure is None:
            # The other ranks wait on their devices, and torch may end this process before it raises.
            log.error("%s", error)
        self._failure.set(error)

    def close(self) -> None:
        self._finalizer()
        self._group.close()
