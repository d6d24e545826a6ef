"""What a wire has sent and how long that took."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from gradwire.errors import Place

# Enough to see a trend, and nothing beside the buckets themselves.
_NUM_STEPS_KEPT = 100


@dataclass(frozen=True)
class BucketStats:
    """One bucket in one step. None stands for what cannot be known."""

    bucket: int
    bytes_sent: int | None
    """Bytes this rank sent; None for a hook that is not gradwire's own."""
    num_messages: int | None
    wait_ms: float | None
    """Time spent waiting for peers; None on CUDA, where the host does not wait."""
    work_ms: float | None
    """Time spent on this rank's own arithmetic; None on CUDA."""


@dataclass(frozen=True)
class StepStats:
    """All buckets of one step."""

    step: int
    buckets: tuple[BucketStats, ...]


@dataclass(frozen=True)
class WireStats:
    """Totals since attach, and the most recent steps, bucket by bucket.

    A total is None when one of its buckets' figures is.
    """

    num_steps: int
    bytes_sent: int | None
    num_messages: int | None
    wait_ms: float | None
    work_ms: float | None
    steps: tuple[StepStats, ...] = field(repr=False)
    num_skipped: int = 0
    """Steps that ``on_nonfinite="skip"`` has left out."""


class StatsBook:
    """Collects figures from whichever thread has them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[tuple[int, list[BucketStats]]] = deque(maxlen=_NUM_STEPS_KEPT)
        self._totals: list[float | None] = [0, 0, 0, 0]

    def record(
        self,
        place: Place,
        bytes_sent: int | None,
        num_messages: int | None,
        wait_s: float | None,
        work_s: float | None,
    ) -> None:
        """Add one bucket's figures."""
        wait_ms, work_ms = (None if s is None else 1e3 * s for s in (wait_s, work_s))
        bucket = BucketStats(place.bucket, bytes_sent, num_messages, wait_ms, work_ms)
        with self._lock:
            if not self._steps or self._steps[-1][0] != place.step:
                self._steps.append((place.step, []))
            self._steps[-1][1].append(bucket)
            figures = (bytes_sent, num_messages, wait_ms, work_ms)
            self._totals = [
                None if total is None or figure is None else total + figure
                for total, figure in zip(self._totals, figures, strict=True)
            ]

    def read(self, num_steps: int) -> WireStats:
        """Everything collected so far."""
        with self._lock:
            bytes_sent, num_messages, wait_ms, work_ms = self._totals
            return WireStats(
                num_steps,
                None if bytes_sent is None else int(bytes_sent),
                None if num_messages is None else int(num_messages),
                wait_ms,
                work_ms,
                tuple(StepStats(step, tuple(buckets)) for step, buckets in self._steps),
            )
