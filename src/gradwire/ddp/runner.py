"""The protocol of a runner, which averages a model's buckets."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.ddp.ddp_bucket import DDPBucket
from gradwire.errors import Place, WireError
from gradwire.lanes import CollectiveWork
from gradwire.telemetry import StatsCollector


class Runner(Protocol):
    """Averages buckets, and keeps the first failure of any rank.

    `Engine` averages by a recipe, `HookRunner` by a user's hook. `SteppingRunner` wraps another runner and
    steps an optimizer with its results.
    """

    stats: StatsCollector

    @property
    def name(self) -> str: ...

    @property
    def failure(self) -> WireError | None: ...

    @property
    def runs_inline(self) -> bool:
        """True if `start` leaves no work behind once it has returned for the last bucket."""
        ...

    def start(self, bucket: DDPBucket, place: Place) -> Future[Tensor]:
        """Begin to average ``bucket``, and return a future of the result."""
        ...

    def run_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> None:
        """Run ``work`` on every rank after all buckets started before it, and wait for its end."""
        ...

    def fail(self, error: WireError) -> None:
        """Fail with ``error``, on every rank."""
        ...

    def give_up(self) -> None:
        """Complete the waiting buckets as they are; no later bucket will come."""
        ...

    def close(self) -> None: ...
