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
from dataclasses import dataclass, field
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

NUM_IN_FLIGHT = 2

Run = Callable[[Tensor, Group, Scratch], Tensor]


@dataclass(frozen=True)
class Task:
    """One bucket's exchange: what to run on which values, and whom to tell about it."""

    flat: Tensor
    run: Run
    place: Place
    report: Callable[[Place, Traffic, float | None], None]
    overlaps: bool = False
    """Whether it may run beside others that do; else it begins when all before it are over."""


class Lane(Protocol):
    """A place where exchanges run one after the other."""

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
    return WorkerLane(group, prefix, NUM_IN_FLIGHT)


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
    """Daemon threads, each with a Gloo group of its own, so that averaging overlaps with backward.

    Tasks go to the threads in turn, on every rank to the same ones: so while one bucket waits for its
    messages, the next is encoded and sent, and each group's messages are in one order on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, prefix: str, num_workers: int = 1) -> None:
        failure = Failure(group, prefix)
        groups: list[GlooGroup | Alone] = [
            Alone() if group is None else open_gloo(group, f"{prefix}/{number}")
            for number in range(num_workers)
        ]
        self._core = _Core(groups, failure)
        timeout = dist.default_pg_timeout if group is None else timeout_of(group)
        watch = Watch(failure, timeout.total_seconds(), self._core.look, prefix)
        # The threads know the core alone, so a lane that nobody holds any more ends.
        threads = [
            threading.Thread(target=worker.serve, name=f"gradwire-{prefix}/{number}", daemon=True)
            for number, worker in enumerate(self._core.workers)
        ]
        for thread in threads:
            thread.start()
        # Runs at exit too: a Gloo group that outlives the interpreter may abort the process.
        self._finalizer = weakref.finalize(self, in_this_process(_end), self._core, threads, watch)

    @property
    def failure(self) -> WireError | None:
        return self._core.failure.error

    def submit(self, task: Task) -> Future[Tensor]:
        future = future_for(task.flat)
        is_cuda = task.flat.is_cuda
        ready = torch.cuda.current_stream(task.flat.device).record_event() if is_cuda else None
        if not self._core.deal(task, future, ready):
            future.set_result(task.flat)
        return future

    def fail(self, error: WireError) -> None:
        self._core.fail(error)

    def close(self) -> None:
        self._finalizer()


@dataclass(frozen=True)
class _Job:
    """A task in a worker's queue; it begins when ``after`` are over."""

    number: int
    task: Task
    future: Future[Tensor]
    ready: torch.cuda.Event | None
    after: tuple[threading.Event, ...]
    over: threading.Event = field(default_factory=threading.Event)


class _Core:
    """What the threads of a worker lane work with."""

    def __init__(self, groups: list[GlooGroup | Alone], failure: Failure) -> None:
        self.failure = failure
        self.workers = [_Worker(self, group) for group in groups]
        self.ended = False
        self.lock = threading.Lock()
        self._explaining = threading.Lock()
        self._num_dealt = 0
        # Of each worker the last job's end, and that of the last job that ran alone.
        self._last = [_over() for _ in groups]
        self._last_alone = _over()

    def deal(self, task: Task, future: Future[Tensor], ready: torch.cuda.Event | None) -> bool:
        """Give a task to the worker whose turn it is; False when the lane has ended."""
        with self.lock:
            if self.ended:
                return False
            turn = self._num_dealt % len(self.workers)
            after = (self._last_alone,) if task.overlaps else tuple(self._last)
            job = _Job(self._num_dealt, task, future, ready, after)
            self._num_dealt += 1
            self._last[turn] = job.over
            if not task.overlaps:
                self._last_alone = job.over
            self.workers[turn].jobs.put(job)
            return True

    def look(self) -> Progress:
        """The earliest task that is not done, or else the last."""
        found = [worker.progress for worker in self.workers]
        under_way = [each for each in found if not each[1].is_done]
        return min(under_way, key=_number)[1] if under_way else max(found, key=_number)[1]

    def explain(self, closed: ClosedGroup) -> None:
        """Fail because a peer cannot be reached; both workers may see it, and one of them tells."""
        with self._explaining:
            if self.failure.error is None:
                first = self.look()
                assert first.place is not None
                self.fail(self.failure.explain(first.place, closed, self.close))

    def fail(self, error: WireError) -> None:
        self.failure.set(error)
        # Closing carries the failure on to every rank that waits for this one.
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.group.close()


class _Worker:
    """One thread of a worker lane, with its group and its scratch memory."""

    def __init__(self, core: _Core, group: GlooGroup | Alone) -> None:
        self.group = group
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._core = core
        self._scratch = Scratch()
        self._number = -1
        self._place: Place | None = None
        self._is_done, self._since = True, time.monotonic()

    @property
    def progress(self) -> tuple[int, Progress]:
        """The number of the task this worker is at, and how far that is."""
        waits_for = self.group.waits_for if isinstance(self.group, GlooGroup) else None
        return self._number, Progress(self._place, self._is_done, self._since, waits_for)

    def serve(self) -> None:
        with torch.no_grad():
            while (job := self.jobs.get()) is not None:
                for earlier in job.after:
                    earlier.wait()
                # Whatever happens, the future is completed: DDP waits for it without a limit.
                try:
                    if job.ready is None:
                        job.future.set_result(self._run(job, job.task.flat))
                    else:
                        self._run_staged(job, job.ready)
                except Exception as error:
                    self._core.fail(locate(error, job.task.place))
                    if not job.future.done():
                        job.future.set_result(job.task.flat)
                finally:
                    job.over.set()
                # Keep nothing of the model alive while waiting for the next bucket.
                del job

    def _run(self, job: _Job, flat: Tensor) -> Tensor:
        task, failure = job.task, self._core.failure
        if failure.error is not None:
            return flat
        before, begin = self.group.traffic.copy(), time.perf_counter()
        self._number, self._place, self._is_done, self._since = job.number, task.place, False, time.monotonic()
        try:
            result = task.run(flat, self.group, self._scratch)
        except ClosedGroup as error:
            self._core.explain(error)
            return flat
        self._is_done, self._since = True, time.monotonic()
        elapsed = time.perf_counter() - begin
        task.report(task.place, self.group.traffic.since(before), elapsed)
        return result

    def _run_staged(self, job: _Job, ready: torch.cuda.Event) -> None:
        """A CUDA bucket over Gloo: through host memory, on a stream of this thread's own."""
        flat = job.task.flat
        stream = torch.cuda.Stream(flat.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = self._run(job, flat.cpu())
            if not result.is_sparse:
                result = flat.copy_(result)
            job.future.set_result(result.to(flat.device))


def _over() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _number(progress: tuple[int, Progress]) -> int:
    return progress[0]


def _end(core: _Core, threads: list[threading.Thread], watch: Watch) -> None:
    with core.lock:
        core.ended = True
        for worker in core.workers:
            worker.jobs.put(None)
    # Before the end of the queues, so that what still stands in them is not begun; no peer is told.
    core.failure.settle()
    core.failure.error = core.failure.error or WireError("this wire has been detached")
    core.close()
    watch.end()
    for thread in threads:
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
