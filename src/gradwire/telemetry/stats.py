"""What a wire has sent and how long that took."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from dataclasses import dataclass, field

from gradwire.errors import Place
from gradwire.peers import Traffic

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
class ParameterStats:
    """One parameter in a step that `Telemetry` compared with the uncompressed mean of its gradients.

    None stands for what is not known or not finite. Norms are Euclidean, in units of the scaled loss if
    there is a ``GradScaler``.
    """

    name: str
    gradient_norm: float | None
    """Of the uncompressed mean."""
    relative_error: float | None
    """Norm of what the wire gave less the uncompressed mean, by the norm of the latter."""
    cosine: float | None
    """Between what the wire gave and the uncompressed mean."""
    residual_norm: float | None
    """Of what this rank holds back after the step, in units of its own gradient; None if nothing is kept."""


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
    parameters: tuple[ParameterStats, ...] = field(default=(), repr=False)
    """The last step that `Telemetry` compared, parameter by parameter."""


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
            # Buckets that were exchanged at the same time may end in any order.
            bisect.insort(self._steps[-1][1], bucket, key=lambda each: each.bucket)
            figures = (bytes_sent, num_messages, wait_ms, work_ms)
            self._totals = [
                None if total is None or figure is None else total + figure
                for total, figure in zip(self._totals, figures, strict=True)
            ]

    def report(self, place: Place, traffic: Traffic, elapsed_s: float | None) -> None:
        """Add the figures of a lane's task; on CUDA, where the host does not wait, no times are known."""
        wait_s = None if elapsed_s is None else traffic.wait_s
        work_s = None if elapsed_s is None else elapsed_s - traffic.wait_s
        self.record(place, traffic.bytes_sent, traffic.num_messages, wait_s, work_s)

    def of_step(self, step: int) -> dict[str, float | None]:
        """The figures of all buckets of a recent step together; None where one of them is not known."""
        with self._lock:
            buckets = next((own for number, own in reversed(self._steps) if number == step), [])
        figures = ("bytes_sent", "num_messages", "wait_ms", "work_ms")
        return {figure: _total([getattr(bucket, figure) for bucket in buckets]) for figure in figures}

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


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
