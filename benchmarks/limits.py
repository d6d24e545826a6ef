"""The least time that a step could take on the cores and links of this machine."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

import gradwire
from gradwire.ddp import ddp_attachment_of


@dataclass(frozen=True)
class HandedOver:
    """One bucket of a step."""

    ms: float
    """When DDP has handed it over, from the start of the step."""
    num_bytes: int
    """The bytes that the recipe announces for it."""


def limit_ms(
    cpu_ms: float,
    world_size: int,
    bits_per_s: float | None,
    sent_bytes: float | None,
    steps: list[list[HandedOver]],
) -> float:
    """Return the least time of a step, all of whose ranks are on this machine.

    Args:
        cpu_ms: the time per step that the threads of a rank keep cores busy.
        world_size: number of ranks.
        bits_per_s: rate of each rank's link; None for no limit.
        sent_bytes: bytes per step that leave a rank's interface; None if they are not known.
        steps: the buckets of each step; empty if they are not known.
    """
    busy_ms = cpu_ms * world_size / (os.cpu_count() or 1)
    if bits_per_s is None:
        return busy_ms
    if not steps:
        return max(busy_ms, 8e3 * (sent_bytes or 0) / bits_per_s)
    return max(busy_ms, statistics.median(_last_sent_ms(buckets, bits_per_s) for buckets in steps))


def _last_sent_ms(buckets: list[HandedOver], bits_per_s: float) -> float:
    """Return when a link has sent all buckets, each as soon as it is there and the link is free."""
    free_ms = 0.0
    for bucket in buckets:
        free_ms = max(free_ms, bucket.ms) + 8e3 * bucket.num_bytes / bits_per_s
    return free_ms


class BucketClock:
    """Notes when DDP hands over the buckets of a wire."""

    def __init__(self, wire: gradwire.Wire) -> None:
        self._wire, self._times = wire, list[float]()
        bridge: Any = ddp_attachment_of(wire).bridge
        run: Callable[[GradBucket], Future[Tensor]] = bridge.run

        def note_and_run(bucket: GradBucket) -> Future[Tensor]:
            self._times.append(time.perf_counter())
            return run(bucket)

        bridge.run = note_and_run

    def steps_since(self, begins: list[float]) -> list[list[HandedOver]]:
        """Return the buckets of the last steps, which began at these times."""
        steps = self._wire.stats().steps[-len(begins) :]
        times = iter(self._times[-sum(len(step.buckets) for step in steps) :])
        return [
            [HandedOver(1e3 * (next(times) - begin), each.bytes_sent or 0) for each in step.buckets]
            for begin, step in zip(begins, steps, strict=True)
        ]
