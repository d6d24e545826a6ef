"""A lane on a CUDA side stream."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
from torch import Tensor

from gradwire.errors import WireError, locate
from gradwire.exchanges import Scratch
from gradwire.lanes.current_stream import StreamInUse
from gradwire.lanes.lifetime import register_finalizer
from gradwire.lanes.recordings import Recordings, may_record
from gradwire.lanes.stream_progress import StreamMark, StreamProgress
from gradwire.lanes.task import Task
from gradwire.peers import Failure, NcclGroup, SingleRankGroup, StallWatcher

log = logging.getLogger("gradwire")


class StreamLane:
    """Run tasks on a side stream per device; the host enqueues them in order and never waits."""

    shares_messages = True
    runs_inline = True

    def __init__(self, group: NcclGroup | SingleRankGroup, failure: Failure, timeout: timedelta) -> None:
        self._group = group
        self._failure = failure
        self._scratch = Scratch()
        self._recordings: Recordings | None = None
        if isinstance(group, NcclGroup) and may_record():
            self._recordings = Recordings(group, self._scratch)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._progress = StreamProgress(timeout.total_seconds() / 2)
        watcher = StallWatcher(failure, timeout.total_seconds(), self._progress.look, "stream")
        self._finalizer = register_finalizer(self, watcher.end)

    @property
    def records(self) -> bool:
        return self._recordings is not None

    @property
    def failure(self) -> WireError | None:
        return self._failure.error

    def submit(self, task: Task) -> None:
        device = task.promises[-1].flat.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        for promise in task.promises:
            assert promise.ready is not None
            stream.wait_event(promise.ready)
        with StreamInUse(stream):
            before = self._group.traffic.copy()
            results = task.flats
            if self.failure is None:  # after a failure, ranks may disagree about what to send
                self._progress.running = task.place, time.monotonic()
                try:
                    results = self._run(task)
                except Exception as error:
                    self.fail(locate(error, task.place))
                self._progress.running = None
                self._progress.add(StreamMark(task.place, stream.record_event(), device, time.monotonic()))
            task.report(task.place, self._group.traffic.since(before), None)
            # A future completed under the side stream makes its readers wait for that stream.
            task.keep(results)

    def _run(self, task: Task) -> list[Tensor]:
        recordings, repeat = self._recordings, task.repeat
        if recordings is not None and repeat is not None and recordings.run(task, repeat):
            return task.flats
        return task.results(task.flats, self._group, self._scratch)

    def free_scratch(self) -> None:
        self._scratch.clear()
        if self._recordings is not None:
            self._recordings.clear()

    def fail(self, error: WireError) -> None:
        if self.failure is None:
            # Logged now: other ranks hang on their devices, and torch may end this process before it raises.
            log.error("%s", error)
        self._failure.set(error)

    def close(self) -> None:
        self._finalizer()
        if self._recordings is not None:
            self._recordings.clear()
        self._group.close()
