"""Where exchanges run: on a worker lane for CPU buckets, on a side stream for CUDA buckets.

Asynchrony lives here and nowhere else. A lane takes tasks in bucket order and runs them in that order,
so every rank issues the same messages in the same order. A future is always completed with a tensor; an
error is kept beside it, in `failure`, and the bridge raises it once DDP has finished its own work.
"""

from __future__ import annotations

import logging
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

from gradwire.board import Board
from gradwire.errors import PeerError, Place, WireError, locate
from gradwire.exchanges import Scratch
from gradwire.transport import ClosedGroup, GlooGroup, Group, NcclGroup, Traffic, store_of

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

    @property
    def failure(self) -> WireError | None:
        """The first error of this lane; once set, it stays."""
        ...

    def submit(self, task: Task) -> Future[Tensor]:
        """Run the task after those submitted before it."""
        ...

    def fail(self, error: WireError) -> WireError:
        """Give the lane up on every rank; returns the first error of all."""
        ...

    def close(self) -> None:
        """End the lane; what is under way is given up."""
        ...


def open_lane(group: dist.ProcessGroup, device: torch.device, prefix: str) -> Lane:
    """A lane for buckets on ``device``; collective over ``group``, and ``prefix`` must be new to it."""
    if device.type == "cuda" and backend_name(group, device) == "nccl":
        return StreamLane(NcclGroup(group))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"gradwire averages gradients on cpu and cuda, not on {device.type}")
    return WorkerLane(group, prefix)


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


class StreamLane:
    """A side stream per device: work is enqueued in order and the host never waits."""

    def __init__(self, group: NcclGroup) -> None:
        self._group = group
        self._scratch = Scratch()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.failure: WireError | None = None

    def submit(self, task: Task) -> Future[Tensor]:
        device = task.flat.device
        future: Future[Tensor] = Future(devices=[device])
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            before = self._group.traffic.copy()
            result = task.flat
            try:
                result = task.run(task.flat, self._group, self._scratch)
            except Exception as error:
                self.fail(locate(error, task.place))
            task.report(task.place, self._group.traffic.since(before), None)
            # Completed under the side stream, the future makes whoever reads it wait for that stream.
            future.set_result(result)
        return future

    def fail(self, error: WireError) -> WireError:
        self.failure = self.failure or error
        return self.failure

    def close(self) -> None:
        self._group.close()


class WorkerLane:
    """A daemon thread with a Gloo group of its own, so that averaging overlaps with backward."""

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._core = _Core(
            GlooGroup(store_of(group), prefix, group.rank(), group.size(), timeout_of(group)),
            Board(store_of(group), prefix),
        )
        # The thread knows the core alone, so a lane that nobody holds any more ends.
        self._thread = threading.Thread(target=self._core.serve, name=f"gradwire-{prefix}", daemon=True)
        self._thread.start()
        # Runs at exit too: a Gloo group that outlives the interpreter may abort the process.
        self._finalizer = weakref.finalize(self, _end, self._core, self._thread)

    @property
    def failure(self) -> WireError | None:
        return self._core.failure

    def submit(self, task: Task) -> Future[Tensor]:
        is_cuda = task.flat.is_cuda
        future: Future[Tensor] = Future(devices=[task.flat.device]) if is_cuda else Future()
        ready = torch.cuda.current_stream(task.flat.device).record_event() if is_cuda else None
        self._core.tasks.put((task, future, ready))
        return future

    def fail(self, error: WireError) -> WireError:
        return self._core.fail(error)

    def close(self) -> None:
        self._finalizer()


_Job = tuple[Task, "Future[Tensor]", "torch.cuda.Event | None"]


class _Core:
    """What a worker lane's thread works with."""

    def __init__(self, group: GlooGroup, board: Board) -> None:
        self.group = group
        self.tasks: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.failure: WireError | None = None
        self._board = board
        self._scratch = Scratch()
        self._lock = threading.Lock()

    def serve(self) -> None:
        with torch.no_grad():
            while (job := self.tasks.get()) is not None:
                task, future, ready = job
                if ready is None:
                    future.set_result(self._run(task, task.flat))
                else:
                    self._run_staged(task, future, ready)
                # Keep nothing of the model alive while waiting for the next bucket.
                del job, task, future, ready

    def _run(self, task: Task, flat: Tensor) -> Tensor:
        if self.failure is not None:
            return flat
        before, begin = self.group.traffic.copy(), time.perf_counter()
        try:
            result = task.run(flat, self.group, self._scratch)
        except ClosedGroup as error:
            self.fail(self._explain(error, task.place))
            return flat
        except Exception as error:
            self.fail(locate(error, task.place))
            return flat
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

    def _explain(self, error: ClosedGroup, place: Place) -> WireError:
        text = self._board.read()
        if text is not None:
            return PeerError(text)
        return WireError(
            f"{place}: {error}. That rank left, died or is stuck; its own output says why. Raise the "
            "timeout of init_process_group if it is only slow"
        )

    def fail(self, error: WireError) -> WireError:
        with self._lock:
            if self.failure is not None:
                return self.failure
            if not isinstance(error, PeerError):
                first = self._board.post(str(error))
                if first != str(error):
                    error = PeerError(first)
            self.failure = error
        # Closing carries the failure on to every rank that waits for this one.
        self.group.close()
        return error


def _end(core: _Core, thread: threading.Thread) -> None:
    core.tasks.put(None)
    core.failure = core.failure or WireError("this wire has been detached")
    core.group.close()
    if thread is not threading.current_thread():
        thread.join(timeout=5)
