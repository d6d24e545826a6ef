"""Threads that run a lane's tasks, so that one bucket travels while another is encoded."""

from __future__ import annotations

import contextlib
import operator
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import WireError, describe, locate
from gradwire.exchanges import Scratch
from gradwire.lanes.task import Task, future_for, in_this_process
from gradwire.peers import Alone, ClosedGroup, Failure, GlooGroup, Progress, StallWatcher


class WorkerLane:
    """Daemon threads, each with a Gloo group of its own, so that averaging overlaps with backward.

    Tasks go to the threads in turn, on every rank to the same ones: so while one bucket waits for its
    messages, the next is encoded and sent, and each group's messages are in one order on every rank.
    """

    shares_messages = False
    runs_at_once = False

    def __init__(
        self, groups: Sequence[GlooGroup | Alone], failure: Failure, timeout: timedelta, name: str
    ) -> None:
        """A thread for each of ``groups``, which are the lane's own and close with it."""
        self._core = _Core(groups, failure)
        watch = StallWatcher(failure, timeout.total_seconds(), self._core.look, name)
        # The threads know the core alone, so a lane that nobody holds any more ends.
        threads = [
            threading.Thread(
                target=worker.serve, args=(self._core,), name=f"gradwire-{name}/{number}", daemon=True
            )
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

    def __init__(self, groups: Sequence[GlooGroup | Alone], failure: Failure) -> None:
        self.failure = failure
        self.workers = [_Worker(group) for group in groups]
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
        by_number = operator.itemgetter(0)
        return (min(under_way, key=by_number) if under_way else max(found, key=by_number))[1]

    def explain(self, closed: ClosedGroup) -> None:
        """Fail because a peer cannot be reached; all workers see it, and one says where this rank stands."""
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

    def __init__(self, group: GlooGroup | Alone) -> None:
        self.group = group
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._scratch = Scratch()
        self._unconnected: RuntimeError | None = None
        self._at = -1, Progress(None, True, time.monotonic())

    @property
    def progress(self) -> tuple[int, Progress]:
        """The number of the task that this worker is at, or has done last, and how far that is."""
        number, progress = self._at
        waits_for = self.group.waits_for if isinstance(self.group, GlooGroup) else None
        return number, replace(progress, waits_for=waits_for)

    def serve(self, core: _Core) -> None:
        self._connect()
        with torch.no_grad():
            while (job := self.jobs.get()) is not None:
                for earlier in job.after:
                    earlier.wait()
                future, over = job.future, job.over
                with contextlib.ExitStack() as streams:
                    result = self._result(core, job, streams)
                    # Who waits for the future may then drop the model and this lane: keep nothing of either.
                    del job
                    future.set_result(result)
                over.set()
                del future, result

    def _connect(self) -> None:
        """Whatever comes of the tasks, so that no other rank waits for this one's connections."""
        if isinstance(self.group, GlooGroup):
            try:
                self.group.open()
            except RuntimeError as error:
                self._unconnected = error

    def _result(self, core: _Core, job: _Job, streams: contextlib.ExitStack) -> Tensor:
        """What a task makes of its bucket; there is one whatever happens, since DDP waits without a limit."""
        flat = job.task.flat
        try:
            if job.ready is None:
                return self._run(core, job, flat)
            # A CUDA bucket over Gloo goes through host memory, on a stream of this thread's own.
            own_stream = torch.cuda.Stream(flat.device)
            streams.enter_context(torch.cuda.stream(own_stream))
            own_stream.wait_event(job.ready)
            result = self._run(core, job, flat.cpu())
            return result.to(flat.device) if result.is_sparse else flat.copy_(result)
        except Exception as error:
            core.fail(locate(error, job.task.place))
        except BaseException as error:  # SystemExit would end this thread alone, with the bucket never done
            core.fail(WireError(f"{job.task.place}: {describe(error)}"))
        return flat

    def _run(self, core: _Core, job: _Job, flat: Tensor) -> Tensor:
        task = job.task
        if core.failure.error is not None:
            return flat
        if self._unconnected is not None:
            raise self._unconnected
        before, begin = self.group.traffic.copy(), time.perf_counter()
        self._at = job.number, Progress(task.place, False, time.monotonic())
        try:
            result = task.run(flat, self.group, self._scratch)
        except ClosedGroup as error:
            core.explain(error)
            return flat
        self._at = job.number, Progress(task.place, True, time.monotonic())
        elapsed = time.perf_counter() - begin
        task.report(task.place, self.group.traffic.since(before), elapsed)
        return result


def _over() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _end(core: _Core, threads: list[threading.Thread], watch: StallWatcher) -> None:
    if threading.current_thread() in threads:
        # One of its own threads has held the lane last. At exit nobody waits for that, a daemon, and one that
        # is caught in C++ aborts the process; for this one the interpreter waits.
        with contextlib.suppress(RuntimeError):  # from Python 3.12 on, when the interpreter ends already
            threading.Thread(target=_end, args=(core, threads, watch), daemon=False).start()
            return
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
