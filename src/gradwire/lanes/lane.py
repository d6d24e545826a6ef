"""The protocol of a lane, and functions that open one.

A lane begins tasks in the order in which they are submitted. That order is the same on all ranks, so all
ranks exchange the same messages in the same order. A lane completes every promise with a tensor, also after
an error. The first error is kept in `failure`, and the caller raises it.
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
from gradwire.peers import (
    Failure,
    NcclGroup,
    SingleRankGroup,
    make_late_gloo,
    open_gloo_groups,
    timeout_of,
    uses_nccl,
)

# The number of buckets in flight on a worker lane. Each has its own scratch memory, twice the size of the
# largest bucket on the wire.
NUM_IN_FLIGHT = 2
# Two buckets are in flight, and each takes up to a round trip. The rest of a backward pass hides that if
# trips are short. With eight buckets of int8 and 163 ms of compute, steps that share messages took 212 ms and
# others 204 where a trip took 41 ms, and 295 and 328 where it took 101 ms.
_SHARING_TRIP_S = 0.05


class Lane(Protocol):
    """Runs tasks in the order in which they are submitted."""

    shares_messages: bool
    """True if small buckets are faster when they wait for one another and share messages."""
    runs_inline: bool
    """True if `submit` itself runs the task; a task that waits for a later one then waits for ever."""

    @property
    def records(self) -> bool:
        """True if it records tasks that do the same in every step."""
        ...

    @property
    def failure(self) -> WireError | None:
        """The first error of this lane; once set, it stays."""
        ...

    def submit(self, task: Task) -> None:
        """Begin the task after those submitted before it; complete its promises, also after an error."""
        ...

    def free_scratch(self) -> None:
        """Free the memory that tasks before have used, before the next task begins."""
        ...

    def fail(self, error: WireError) -> None:
        """Fail with ``error``, on every rank."""
        ...

    def close(self) -> None:
        """End the lane, and give up the tasks under way."""
        ...


def open_lane(
    group: dist.ProcessGroup,
    device: torch.device,
    prefix: str,
    *,
    late: bool = False,
    num_in_flight: int | None = None,
    in_steps: bool = False,
) -> Lane:
    """Open a lane for buckets on ``device``; collective over ``group``.

    Args:
        group: the ranks to exchange messages with.
        device: where the buckets are.
        prefix: a name that all ranks share, and that the group has not used before.
        late: True to connect while tasks queue; for hooks, which must not wait for other ranks.
        num_in_flight: the number of worker threads; by default `NUM_IN_FLIGHT`.
        in_steps: True if all tasks of a step end before those of the next one are submitted.
    """
    if uses_nccl(group, device):
        return StreamLane(NcclGroup(group), Failure(group, prefix), timeout_of(group))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"gradwire averages gradients on cpu and cuda, not on {device.type}; move the model there"
        )
    failure, timeout = Failure(group, prefix), timeout_of(group)
    prefixes = [f"{prefix}/{number}" for number in range(num_in_flight or NUM_IN_FLIGHT)]
    if late:
        groups, shares_messages = [make_late_gloo(group, each) for each in prefixes], False
    else:
        groups = open_gloo_groups(group, prefixes)
        shares_messages = groups[0].trip_s > _SHARING_TRIP_S
    with contextlib.ExitStack() as undo:
        for each in groups:
            undo.callback(each.close)
        lane = WorkerLane(
            groups, failure, timeout, prefix, shares_messages=shares_messages, in_steps=in_steps
        )
        undo.pop_all()
    return lane


def open_local_lane(device: torch.device, name: str) -> Lane:
    """Open a lane for work that needs no other rank; its failures stay on this rank."""
    if device.type == "cuda":
        return StreamLane(SingleRankGroup(), Failure(None, name), dist.default_pg_timeout)
    return WorkerLane([SingleRankGroup()], Failure(None, name), dist.default_pg_timeout, name)
