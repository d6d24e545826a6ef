"""Where exchanges run: on a worker lane for CPU buckets, on a side stream for CUDA buckets.

Asynchrony lives here and in `workers`, and nowhere else. A lane begins tasks in the order in which it takes
them, the same on all ranks, so every rank issues the same messages in the same order. A future is always
completed with a tensor; an error is kept beside it, in `failure`, and the bridge raises it once DDP has
finished its own work.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.errors import WireError
from gradwire.lanes.stream import StreamLane
from gradwire.lanes.task import Task
from gradwire.lanes.workers import WorkerLane
from gradwire.peers import Alone, Failure, NcclGroup, backend_name, open_gloo, timeout_of

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
