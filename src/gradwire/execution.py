"""Where exchanges run: on a worker lane for CPU buckets, on a side stream for CUDA buckets.

Asynchrony lives here and in `workers`, and nowhere else. A lane begins tasks in the order in which it takes
them, the same on all ranks, so every rank issues the same messages in the same order. A future is always
completed with a tensor; an error is kept beside it, in `failure`, and the bridge raises it once DDP has
finished its own work.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.futures import Future

from gradwire.errors import WireError, locate
from gradwire.exchanges import Scratch
from gradwire.failure import Failure
from gradwire.marks import Mark, Marks
from gradwire.tasks import Task, future_for, in_this_process
from gradwire.transport import Alone, GlooGroup, NcclGroup
from gradwire.watch import Watch
from gradwire.workers import WorkerLane

log = logging.getLogger("gradwire")

# Each has scratch memory of its own, about what the largest bucket takes on the wire, twice.
NUM_IN_FLIGHT = 2


class Lane(Protocol):
    """A place where exchanges run, in the order in which they come."""

    shares_messages: bool
    """Whether buckets had better wait for one another than send messages of few bytes."""
    runs_at_once: bool
    """Whether `submit` runs the task itself, so that one that waits for a later one would wait for ever."""

    @property
    def failure(self) -> WireError | None:
        """The first error of this lane; once set, it stays."""
        ...

    def submit(self, task: Task) -> Future[Tensor]:
        """Begin the task after those submitted before it; if it does not overlap, when they are over."""
        ...

    def fail(self, error: WireError) -> None:
        """Give the lane up, on every rank."""
        ...

    def close(self) -> None:
        """End the lane; what is under way is given up."""
        ...


def open_lane(group: dist.ProcessGroup, device: torch.device, prefix: str, *, late: bool = False) -> Lane:
    """A lane for buckets on ``device``; collective over ``group``, and ``prefix`` must be new to it.

    With ``late``, for hooks, which must not wait for others, its threads connect while tasks queue.
    """
    if device.type == "cuda" and backend_name(group, device) == "nccl":
        return StreamLane(NcclGroup(group), Failure(group, prefix), timeout_of(group))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"gradwire averages gradients on cpu and cuda, not on {device.type}")
    failure, timeout = Failure(group, prefix), timeout_of(group)
    with contextlib.ExitStack() as undo:
        groups = []
        for number in range(NUM_IN_FLIGHT):
            groups.append(open_gloo(group, f"{prefix}/{number}", late=late))
            undo.callback(groups[-1].close)
        lane = WorkerLane(groups, failure, timeout, prefix)
        undo.pop_all()
    return lane


def open_local_lane(device: torch.device, name: str) -> Lane:
    """A lane for work that needs no other rank; its failures stay on this rank."""
    if device.type == "cuda":
        return StreamLane(Alone(), Failure(None, name), dist.default_pg_timeout)
    return WorkerLane([Alone()], Failure(None, name), dist.default_pg_timeout, name)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves tensors on ``device`` in ``group``."""
    return group._get_backend(device).name().lower()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the group's own collectives wait."""
    for device in group._device_types:
        timeout = getattr(group._get_backend(device).options, "_timeout", None)
        if timeout is not None:
            return timedelta(seconds=timeout.total_seconds())
    return dist.default_pg_timeout


def open_gloo(group: dist.ProcessGroup, prefix: str, *, late: bool = False) -> GlooGroup:
    """A Gloo group of our own, with the ranks and the timeout of ``group``; collective, or its `open` is."""
    store: Any = group.get_group_store()
    if late and isinstance(getattr(store, "_underlying_non_prefix_store", None), TCPStore):
        store = store.clone()
    return GlooGroup(store, prefix, group.rank(), group.size(), timeout_of(group), late=late)


class StreamLane:
    """A side stream per device: work is enqueued in order and the host never waits."""

    shares_messages = True
    runs_at_once = True

    def __init__(self, group: NcclGroup | Alone, failure: Failure, timeout: timedelta) -> None:
        self._group = group
        self._failure = failure
        self._scratch = Scratch()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._marks = Marks(timeout.total_seconds() / 2)
        watch = Watch(failure, timeout.total_seconds(), self._marks.look, "stream")
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
                self._marks.add(Mark(task.place, stream.record_event(), device, time.monotonic()))
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
