"""A lane on worker threads, so that one bucket travels while another is encoded."""

from __future__ import annotations

import contextlib
import operator
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch import Tensor

from gradwire.errors import WireError, describe, locate
from gradwire.exchanges import Scratch
from gradwire.lanes.current_stream import StreamInUse
from gradwire.lanes.lifetime import is_exiting, join_threads, register_finalizer
from gradwire.lanes.task import Task
from gradwire.peers import Failure, GlooGroup, PeerUnreachable, Progress, SingleRankGroup, StallWatcher


class WorkerLane:
    """Run tasks on daemon threads, each with its own Gloo group, so that averaging overlaps with backward.

    Tasks go to the threads in turn, the same way on every rank. So the next bucket is encoded and sent while
    one waits for its messages, and each group's messages have the same order on every rank. If buckets share
    messages and no two steps are under way, each step begins with the first thread: see `_Pool.submit`.
    """

    records = False
    runs_inline = False

    def __init__(
        self,
        groups: Sequence[GlooGroup | SingleRankGroup],
        failure: Failure,
        timeout: timedelta,
        name: str,
        *,
        shares_messages: bool = False,
        in_steps: bool = False,
    ) -> None:
        """Start a thread for each of ``groups``, which belong to the lane and close with it.

        ``in_steps`` is as for `open_lane`.
        """
        self.shares_messages = shares_messages
        self._pool = _Pool(groups, failure, begins_anew=shares_messages and in_steps)
        watcher = StallWatcher(failure, timeout.total_seconds(), self._pool.look, name)
        # The threads hold the pool, not the lane: a lane that nobody else holds can be collected.
        threads = [
            threading.Thread(
                target=worker.serve, args=(self._pool,), name=f"gradwire-{name}/{number}", daemon=True
            )
            for number, worker in enumerate(self._pool.workers)
        ]
        for thread in threads:
            thread.start()
        # The finalizer also runs at exit: a Gloo group that outlives the interpreter may abort the process.
        self._finalizer = register_finalizer(self, _end, self._pool, threads, watcher)

    @property
    def failure(self) -> WireError | None:
        return self._pool.failure.error

    def submit(self, task: Task) -> None:
        if not self._pool.submit(task):
            task.keep(task.flats)

    def free_scratch(self) -> None:
        for worker in self._pool.workers:
            worker.frees_scratch = True

    def fail(self, error: WireError) -> None:
        self._pool.fail(error)

    def close(self) -> None:
        self._finalizer()


@dataclass(frozen=True)
class _QueuedTask:
    """A task in a worker's queue."""

    number: int
    task: Task
    after: tuple[threading.Event, ...]
    """The ends of the tasks that must be done before this one begins."""
    done: threading.Event = field(default_factory=threading.Event)


class _Pool:
    """The workers of a lane, and the state that they share."""

    def __init__(
        self, groups: Sequence[GlooGroup | SingleRankGroup], failure: Failure, *, begins_anew: bool
    ) -> None:
        self.failure = failure
        self.workers = [_Worker(group) for group in groups]
        self.ended = False
        self.lock = threading.Lock()
        self._explaining = threading.Lock()
        self._num_submitted = 0
        self._begins_anew = begins_anew
        self._step, self._num_in_turns = -1, 0
        # The end of each worker's last task, and of the last task that ran alone.
        self._last = [_set_event() for _ in groups]
        self._last_alone = _set_event()

    def submit(self, task: Task) -> bool:
        """Queue a task for the worker whose turn it is; return False if the lane has ended.

        On far links a step may be one task. If workers took turns, a connection would be used in every other
        step, and TCP would begin slowly each time: it does if it has been idle for more than two round trips
        or so. Steps of 109 ms on links 100 ms long then took 309 ms.
        """
        with self.lock:
            if self.ended:
                return False
            if self._begins_anew and task.place.step != self._step:
                self._step, self._num_in_turns = task.place.step, 0
            turn = self._num_in_turns % len(self.workers)
            self._num_in_turns += 1
            after = (self._last_alone,) if task.overlaps else tuple(self._last)
            queued = _QueuedTask(self._num_submitted, task, after)
            self._num_submitted += 1
            self._last[turn] = queued.done
            if not task.overlaps:
                self._last_alone = queued.done
            self.workers[turn].queue.put(queued)
            return True

    def look(self) -> Progress:
        """Return the progress of the earliest task that is not done; otherwise of the last task."""
        found = [worker.progress for worker in self.workers]
        under_way = [each for each in found if not each[1].is_done]
        by_number = operator.itemgetter(0)
        return (min(under_way, key=by_number) if under_way else max(found, key=by_number))[1]

    def explain(self, closed: PeerUnreachable) -> None:
        """Fail because a peer cannot be reached; only the first worker to call this explains why."""
        with self._explaining:
            if self.failure.error is None:
                first = self.look()
                assert first.place is not None
                self.fail(self.failure.explain(first.place, closed, self.close))

    def fail(self, error: WireError) -> None:
        self.failure.set(error)
        # Closing the groups wakes every rank that waits for this one.
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.group.close()


class _Worker:
    """One thread of a lane, with its group and its scratch memory."""

    def __init__(self, group: GlooGroup | SingleRankGroup) -> None:
        self.group = group
        self.queue: queue.SimpleQueue[_QueuedTask | None] = queue.SimpleQueue()
        self._scratch = Scratch()
        self.frees_scratch = False
        """True to free the scratch memory before the next task."""
        self._unconnected: PeerUnreachable | None = None
        self._at = -1, Progress(None, True, time.monotonic())

    @property
    def progress(self) -> tuple[int, Progress]:
        """The number and the progress of the task that this worker runs, or has run last."""
        number, progress = self._at
        waits_for = self.group.waits_for if isinstance(self.group, GlooGroup) else None
        return number, replace(progress, waits_for=waits_for)

    def serve(self, pool: _Pool) -> None:
        self._connect()
        with torch.no_grad():
            while (queued := self.queue.get()) is not None:
                for earlier in queued.after:
                    earlier.wait()
                promises, done = queued.task.promises, queued.done
                with contextlib.ExitStack() as streams:
                    results = self._results(pool, queued, streams)
                    # Whoever waits for a future may then drop the model and this lane: hold neither.
                    del queued
                    while results:
                        promises[-len(results)].keep(results.pop(0))
                del promises, results
                done.set()
                del done

    def _connect(self) -> None:
        """Connect even if no task comes, so that no other rank waits; keep an error for the tasks."""
        if isinstance(self.group, GlooGroup):
            try:
                self.group.open()
            except PeerUnreachable as error:
                self._unconnected = error

    def _results(self, pool: _Pool, queued: _QueuedTask, streams: contextlib.ExitStack) -> list[Tensor]:
        """Return the results of a task; after an error, its values as they are."""
        task = queued.task
        try:
            if task.promises[0].ready is None:
                return self._run(pool, queued, task.flats)
            # CUDA buckets over Gloo go through host memory, on a stream of this thread.
            own_stream = torch.cuda.Stream(task.promises[0].flat.device)
            streams.enter_context(StreamInUse(own_stream))
            for promise in task.promises:
                assert promise.ready is not None
                own_stream.wait_event(promise.ready)
            results = self._run(pool, queued, [flat.cpu() for flat in task.flats])
            return [_to_device(result, flat) for result, flat in zip(results, task.flats, strict=True)]
        except Exception as error:
            pool.fail(locate(error, task.place))
        # SystemExit would end only this thread, and the bucket would never be done.
        except BaseException as error:
            pool.fail(WireError(f"{task.place}: {describe(error)}"))
        return task.flats

    def _run(self, pool: _Pool, queued: _QueuedTask, flats: list[Tensor]) -> list[Tensor]:
        task = queued.task
        if pool.failure.error is not None:
            return flats
        if self.frees_scratch:
            self.frees_scratch = False
            self._scratch.clear()
        before, begin = self.group.traffic.copy(), time.perf_counter()
        self._at = queued.number, Progress(task.place, False, time.monotonic())
        try:
            if self._unconnected is not None:
                raise self._unconnected
            results = task.results(flats, self.group, self._scratch)
        except PeerUnreachable as error:
            pool.explain(error)
            return flats
        self._at = queued.number, Progress(task.place, True, time.monotonic())
        elapsed = time.perf_counter() - begin
        task.report(task.place, self.group.traffic.since(before), elapsed)
        return results


def _to_device(result: Tensor, flat: Tensor) -> Tensor:
    return result.to(flat.device) if result.is_sparse else flat.copy_(result)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _end(pool: _Pool, threads: list[threading.Thread], watcher: StallWatcher) -> None:
    if threading.current_thread() in threads:
        # One of the lane's own threads dropped the last reference to it. That thread is a daemon: at exit the
        # interpreter does not wait for it, and aborts the process if it is inside C++. So a thread that is
        # no daemon does the rest.
        with contextlib.suppress(RuntimeError):  # raised from Python 3.12 on, if the interpreter is ending
            threading.Thread(target=_end, args=(pool, threads, watcher), daemon=False).start()
            return
    with pool.lock:
        pool.ended = True
        for worker in pool.workers:
            worker.queue.put(None)
    # Set before the queues end, so that no queued task begins. No peer is told.
    pool.failure.wait_until_posted()
    has_failed = pool.failure.error is not None
    pool.failure.error = pool.failure.error or WireError("this wire has been detached")
    pool.close()
    if has_failed and is_exiting():
        pool.failure.wait_until_known()
    watcher.end()
    join_threads(threads)
