"""Where exchanges run: on a worker lane for CPU buckets, on a side stream for CUDA buckets.

Asynchrony lives here and nowhere else. A lane takes tasks in bucket order and runs them in that order,
so every rank issues the same messages in the same order. A future is always completed with a tensor; an
error is kept beside it, in `failure`, and the bridge raises it once DDP has finished its own work.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place, WireError, locate
from gradwire.exchanges import Scratch
from gradwire.failure import Failure
from gradwire.marks import Mark, Marks
from gradwire.transport import Alone, ClosedGroup, GlooGroup, Group, NcclGroup, Traffic
from gradwire.watch import Progress, Watch

log = logging.getLogger("gradwire")

Run = Callable[[Tensor, Group, Scratch], Tensor]


@dataclass(frozen=True)
class Task:
    """One bucket's exchange: what to run on which values, and whom to tell about it."""

    flat: Tensor
    run: Run
    place: Place
    report: Callable[[Place, Traffic, float | None], None]


class Lane(Protocol):
    """A place where exchanges run one after the other."""

    shares_messages: bool
    """Whether buckets had better wait for one another than send messages of few bytes."""

    @property
    def failure(self) -> WireError | None:
        """The first error of this lane; once set, it stays."""
        ...

    def submit(self, task: Task) -> Future[Tensor]:
        """Run the task after those submitted before it."""
        ...

    def fail(self, error: WireError) -> None:
        """Give the lane up, on every rank."""
        ...

    def close(self) -> None:
        """End the lane; what is under way is given up."""
        ...


def open_lane(group: dist.ProcessGroup, device: torch.device, prefix: str) -> Lane:
    """A lane for buckets on ``device``; collective over ``group``, and ``prefix`` must be new to it."""
    if device.type == "cuda" and backend_name(group, device) == "nccl":
        return StreamLane(NcclGroup(group), Failure(group, prefix), timeout_of(group))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"gradwire averages gradients on cpu and cuda, not on {device.type}")
    return WorkerLane(group, prefix)


def open_local_lane(device: torch.device, name: str) -> Lane:
    """A lane for work that needs no other rank; its failures stay on this rank."""
    if device.type == "cuda":
        return StreamLane(Alone(), Failure(None, name), dist.default_pg_timeout)
    return WorkerLane(None, name)


def report_nothing(place: Place, traffic: Traffic, elapsed_s: float | None) -> None:
    """For a task that belongs to no bucket, or to one that has been reported."""


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


def open_gloo(group: dist.ProcessGroup, prefix: str) -> GlooGroup:
    """A Gloo group of our own with the ranks and the timeout of ``group``; collective."""
    try:
        return GlooGroup(group.get_group_store(), prefix, group.rank(), group.size(), timeout_of(group))
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {group.rank()}: gradwire could not connect to the other ranks of the group: {error}"
        ) from error


class StreamLane:
    """A side stream per device: work is enqueued in order and the host never waits."""

    shares_messages = True

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


class WorkerLane:
    """A daemon thread with a Gloo group of its own, so that averaging overlaps with backward."""

    shares_messages = False

    def __init__(self, group: dist.ProcessGroup | None, prefix: str) -> None:
        own = Alone() if group is None else open_gloo(group, prefix)
        self._core = _Core(own, Failure(group, prefix))
        timeout = dist.default_pg_timeout if group is None else timeout_of(group)
        watch = Watch(self._core.failure, timeout.total_seconds(), self._core.look, prefix)
        # The thread knows the core alone, so a lane that nobody holds any more ends.
        self._thread = threading.Thread(target=self._core.serve, name=f"gradwire-{prefix}", daemon=True)
        self._thread.start()
        # Runs at exit too: a Gloo group that outlives the interpreter may abort the process.
        self._finalizer = weakref.finalize(self, in_this_process(_end), self._core, self._thread, watch)

    @property
    def failure(self) -> WireError | None:
        return self._core.failure.error

    def submit(self, task: Task) -> Future[Tensor]:
        future = future_for(task.flat)
        is_cuda = task.flat.is_cuda
        ready = torch.cuda.current_stream(task.flat.device).record_event() if is_cuda else None
        with self._core.lock:
            if not self._core.ended:
                self._core.jobs.put((task, future, ready))
                return future
        future.set_result(task.flat)
        return future

    def fail(self, error: WireError) -> None:
        self._core.fail(error)

    def close(self) -> None:
        self._finalizer()


_Job = tuple[Task, "Future[Tensor]", "torch.cuda.Event | None"]


class _Core:
    """What a worker lane's thread works with."""

    def __init__(self, group: GlooGroup | Alone, failure: Failure) -> None:
        self.group = group
        self.failure = failure
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.ended = False
        self._scratch = Scratch()
        self._place: Place | None = None
        self._is_done, self._since = True, time.monotonic()

    def look(self) -> Progress:
        waits_for = self.group.waits_for if isinstance(self.group, GlooGroup) else None
        return Progress(self._place, self._is_done, self._since, waits_for)

    def serve(self) -> None:
        with torch.no_grad():
            while (job := self.jobs.get()) is not None:
                task, future, ready = job
                # Whatever happens, the future is completed: DDP waits for it without a limit.
                try:
                    if ready is None:
                        result = self._run(task, task.flat)
                        future.set_result(result)
                    else:
                        self._run_staged(task, future, ready)
                except Exception as error:
                    self.fail(locate(error, task.place))
                    if not future.done():
                        future.set_result(task.flat)
                # Keep nothing of the model alive while waiting for the next bucket.
                del job, task, future, ready

    def _run(self, task: Task, flat: Tensor) -> Tensor:
        if self.failure.error is not None:
            return flat
        before, begin = self.group.traffic.copy(), time.perf_counter()
        self._place, self._is_done, self._since = task.place, False, time.monotonic()
        try:
            result = task.run(flat, self.group, self._scratch)
        except ClosedGroup as error:
            if self.failure.error is None:
                self.fail(self.failure.explain(task.place, error, self.group.close))
            return flat
        self._is_done, self._since = True, time.monotonic()
        elapsed = time.perf_counter() - begin
        task.report(task.place, self.group.traffic.since(before), elapsed)
        return result

    def _run_staged(self, task: Task, future: Future[Tensor], ready: torch.cuda.Event) -> None:
        """A CUDA bucket over Gloo: through host memory, on a stream of this thread's own."""
        stream = torch.cuda.Stream(task.flat.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = self._run(task, task.flat.cpu())
            if not result.is_sparse:
                result = task.flat.copy_(result)
            future.set_result(result.to(task.flat.device))

    def fail(self, error: WireError) -> None:
        self.failure.set(error)
        # Closing carries the failure on to every rank that waits for this one.
        self.group.close()


def _end(core: _Core, thread: threading.Thread, watch: Watch) -> None:
    with core.lock:
        core.ended = True
        core.jobs.put(None)
    # Before the end of the queue, so that what still stands in it is not begun; no peer is told.
    core.failure.settle()
    core.failure.error = core.failure.error or WireError("this wire has been detached")
    core.group.close()
    watch.end()
    if thread is not threading.current_thread():
        thread.join(timeout=5)


def in_this_process(end: Callable[..., None]) -> Callable[..., None]:
    """``end``, which does nothing in a process forked off this one: the connections are not its own."""
    pid = os.getpid()

    def end_here(*args: object) -> None:
        if os.getpid() == pid:
            end(*args)

    return end_here


def future_for(value: Tensor) -> Future[Tensor]:
    """An open future that can hold a tensor on the device of ``value``."""
    return Future(devices=[value.device]) if value.is_cuda else Future()
