"""Recordings of a lane's tasks on a CUDA stream.

The host takes longer to begin a kernel from Python than the device takes to run a small one. So the kernels
of a task that does the same in every step are recorded as CUDA graphs, which the host begins in one call.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.exchanges import Scratch
from gradwire.peers import NcclGroup, Traffic

if TYPE_CHECKING:
    from gradwire.lanes.task import Task

# The first run of a task allocates memory and compiles kernels, and DDP rebuilds its buckets after a step.
_RUNS_BEFORE = 2
# Tasks that were not replayed in so many steps will hardly come back: their buckets lie elsewhere by now.
_STEPS_KEPT = 100
# The number of tasks to count runs of. Tasks that never come twice, such as those of tensors that are made in
# each step, would fill the memory.
_NUM_COUNTED = 8192


@dataclass(frozen=True)
class RepeatKey:
    """Everything that a task's work on its device depends on, besides the values in memory and the step."""

    facts: tuple[Hashable, ...]
    """Facts, and ids of ``objects``."""
    objects: tuple[object, ...] = field(compare=False)
    """Kept alive, so that no other object gets its id."""


RecordedRun = Callable[[Sequence[Tensor], NcclGroup, Scratch, Tensor], object]
"""Run a task with the step in device memory: the last argument, from which kernels read it."""


@dataclass(frozen=True)
class Repeat:
    """The way in which a task is recorded: a run, and the key by which the same work is found again."""

    key: RepeatKey
    run: RecordedRun
    reads_step: Callable[[], bool]
    """Returns True if kernels read the step from device memory."""


def may_record() -> bool:
    """Return True unless the environment variable ``GRADWIRE_CUDA_GRAPHS`` is 0."""
    return os.environ.get("GRADWIRE_CUDA_GRAPHS") != "0"


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage: a graph or an event that is destroyed during a recording would spoil it."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


class Recordings:
    """The recordings of the tasks of one lane."""

    def __init__(self, group: NcclGroup, scratch: Scratch) -> None:
        self._group = group
        self._scratch = scratch
        self._recorded: dict[RepeatKey, _Recording] = {}
        self._num_runs: dict[RepeatKey, int] = {}
        self._steps: dict[torch.device, Tensor] = {}
        self._pools: dict[torch.device, Any] = {}

    def run(self, task: Task, repeat: Repeat) -> bool:
        """Run a task from its recording, or while it is recorded; return False if it has to run without one.

        Called with the lane's stream as the current one.
        """
        if torch.cuda.is_current_stream_capturing():  # the user records the whole step
            return False
        recording = self._recorded.get(repeat.key)
        if recording is not None:
            recording.replay(task.place.step, self._group.traffic)
            return True
        if not self._is_time_for(repeat.key):
            return False
        self._forget_old(task.place.step)
        self._recorded[repeat.key] = self._record(task, repeat)
        return True

    def clear(self) -> None:
        """Forget all recordings, and free their memory."""
        self._recorded.clear()
        self._num_runs.clear()
        self._pools.clear()

    def _is_time_for(self, key: RepeatKey) -> bool:
        num_runs = self._num_runs.pop(key, 0)
        if num_runs >= _RUNS_BEFORE:
            return True
        if len(self._num_runs) >= _NUM_COUNTED:
            self._num_runs.clear()
        self._num_runs[key] = num_runs + 1
        return False

    def _forget_old(self, step: int) -> None:
        old = [key for key, each in self._recorded.items() if each.last_step < step - _STEPS_KEPT]
        for key in old:
            del self._recorded[key]

    def _record(self, task: Task, repeat: Repeat) -> _Recording:
        device, flats = task.promises[-1].flat.device, task.flats
        step = self._steps.get(device)
        if step is None:
            step = self._steps[device] = torch.zeros((), dtype=torch.int64, device=device)
        # All recordings of a device share their memory: they run one after the other on one stream.
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = torch.cuda.graph_pool_handle()
        step.fill_(task.place.step)
        before = self._group.traffic.copy()
        recorder = _Recorder(pool)
        with recorder.recording(self._group):
            repeat.run(flats, self._group, self._scratch, step)
        read_step = step if repeat.reads_step() else None
        traffic = self._group.traffic.since(before)
        return _Recording(recorder.work, read_step, traffic, self._scratch.buffers(), task.place.step)


@dataclass
class _Recording:
    """The work of one task: graphs of kernels, and the messages between them."""

    work: list[Callable[[], object]]
    step: Tensor | None
    """The memory from which kernels read the step; None if they do not."""
    traffic: Traffic
    keeps: list[Tensor]
    """Memory that the kernels use, and that nothing else may hold any more."""
    last_step: int

    def replay(self, step: int, traffic: Traffic) -> None:
        """Do the work again in another step, and add its messages to ``traffic``."""
        if self.step is not None:
            self.step.fill_(step)
        for each in self.work:
            each()
        traffic.bytes_sent += self.traffic.bytes_sent
        traffic.num_messages += self.traffic.num_messages
        self.last_step = step


class _Recorder:
    """Records what is begun on the current stream, and does it: a graph ends before each message.

    Messages are not part of graphs. A communicator cannot be destroyed while a graph uses it, and NCCL's
    watchdog in torch does not see the messages of graphs.
    """

    def __init__(self, pool: Any) -> None:
        self.work: list[Callable[[], object]] = []
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def recording(self, group: NcclGroup) -> Iterator[None]:
        """Record what the block begins, on the current stream and over ``group``."""
        group.begin = self._launch
        try:
            with no_collection():
                self._begin()
                try:
                    yield
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        self._graph.capture_end()  # so that the stream can be used again
                    raise
                self._end()
        finally:
            group.begin = None

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory and query events meanwhile.
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self._graph.capture_end()
        self._do(self._graph.replay)

    def _launch(self, message: Callable[[], object]) -> None:
        self._end()
        self._do(message)
        self._begin()

    def _do(self, work: Callable[[], object]) -> None:
        work()
        self.work.append(work)
