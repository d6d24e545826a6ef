"""The protocol of what averages a model's buckets."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.averaging import Bucket
from gradwire.errors import Place, WireError
from gradwire.lanes import CollectiveWork
from gradwire.telemetry import StatsCollector


class Runner(Protocol):
    """Averages buckets, and remembers the first failure of any rank.

    An `Engine` is one; so are a hook of the user's and an optimizer that steps what another runner averages.
    """

    stats: StatsCollector

    @property
    def name(self) -> str: ...

    @property
    def failure(self) -> WireError | None: ...

    @property
    def runs_at_once(self) -> bool:
        """True if `start` leaves no work behind once it has returned for the last bucket."""
        ...

    def start(self, bucket: Bucket, place: Place) -> Future[Tensor]:
        """Begin to average a bucket."""
        ...

    def run_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> None:
        """Run ``work`` on every rank after all that was started before it, and wait for its end."""
        ...

    def fail(self, error: WireError) -> None:
        """Give up, on every rank."""
        ...

    def give_up(self) -> None:
        """Complete the buckets that wait for later ones, as they are."""
        ...

    def close(self) -> None: ...
