"""Lanes: where tasks run, on worker threads for CPU buckets and on a side stream for CUDA ones.

A lane begins tasks in the order in which it takes them, the same on all ranks, so every rank issues the same
messages in the same order. It keeps every promise with a tensor. An error is kept beside it, in `failure`,
and raised by the caller.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
import torch.distributed as dist

from gradwire.errors import WireError
from gradwire.lanes.stream import StreamLane
from gradwire.lanes.task import Task
from gradwire.lanes.workers import WorkerLane
from gradwire.peers import Failure, NcclGroup, SingleRankGroup, backend_name, open_gloo, timeout_of

# Buckets in flight. Each has scratch memory of its own: twice what the largest bucket takes on the wire.
NUM_IN_FLIGHT = 2


class Lane(Protocol):
    """A place where tasks run, in the order in which they come."""

    shares_messages: bool
    """True if buckets of few bytes had better wait for one another than send messages of their own."""
    runs_at_once: bool
    """True if `submit` runs the task itself; a task that waits for a later one would then wait for ever."""

    @property
    def failure(self) -> WireError | None:
        """The first error of this lane; once set, it stays."""
        ...

    def submit(self, task: Task) -> None:
        """Begin the task after those submitted before it, and keep its promises, whatever happens."""
        ...

    def fail(self, error: WireError) -> None:
        """Give the lane up, on every rank."""
        ...

    def close(self) -> None:
        """End the lane; tasks under way are given up."""
        ...


def open_lane(group: dist.ProcessGroup, device: torch.device, prefix: str, *, late: bool = False) -> Lane:
    """Open a lane for buckets on ``device``; collective over ``group``, and ``prefix`` must be new to it.

    With ``late``, its threads connect while tasks queue: a hook must not wait for other ranks.
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
    """Open a lane for work that needs no other rank; its failures stay on this rank."""
    if device.type == "cuda":
        return StreamLane(SingleRankGroup(), Failure(None, name), dist.default_pg_timeout)
    return WorkerLane([SingleRankGroup()], Failure(None, name), dist.default_pg_timeout, name)
