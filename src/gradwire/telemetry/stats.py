"""Statistics of a wire: the bytes and messages it has sent, and the time that took."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from gradwire.errors import Place
from gradwire.peers import Traffic

Figure = Literal["bytes_sent", "num_messages", "wait_ms", "work_ms"]
"""A figure of a bucket."""

# Enough to see a trend; the memory is small beside that of the buckets.
_NUM_STEPS_KEPT = 100
# The number of buckets that are sorted at once, unless somebody asks earlier.
_NUM_UNSORTED = 1024
# The most steps that may be under way when a bucket of the first of them ends.
_NUM_STEPS_UNDER_WAY = 8


@dataclass(frozen=True)
class BucketStats:
    """The figures of one bucket in one step; None for a figure that is not known.

    >>> wire = gradwire.attach(model, "int8")
    >>> model(inputs).sum().backward()
    >>> wire.stats().steps[-1].buckets[0].bucket
    0
    """

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
    """The figures of all buckets of one step.

    >>> wire = gradwire.attach(model, "int8")
    >>> model(inputs).sum().backward()
    >>> wire.stats().steps[-1].step
    0
    """

    step: int
    buckets: tuple[BucketStats, ...]


@dataclass(frozen=True)
class ParameterStats:
    """The figures of one parameter in a step that `Telemetry` compared with the exact average.

    A figure is None if it is not known or not finite. Norms are Euclidean. With a ``GradScaler``, they are
    those of gradients of the scaled loss.

    >>> wire = gradwire.attach(model, "fp32", telemetry=gradwire.Telemetry(every=1))
    >>> model(inputs).sum().backward()
    >>> [(each.name, each.relative_error) for each in wire.stats().parameters]
    [('weight', 0.0), ('bias', 0.0)]
    """

    name: str
    gradient_norm: float | None
    """Norm of the exact average."""
    relative_error: float | None
    """Norm of the difference between the wire's and the exact average, divided by the norm of the latter."""
    cosine: float | None
    """Cosine of the angle between the wire's average and the exact one."""
    residual_norm: float | None
    """Norm of this rank's residual after the step, in units of its own gradient; None without one."""


@dataclass(frozen=True)
class WireStats:
    """Totals since `attach`, and the figures of the most recent steps, bucket by bucket.

    A total is None if the figure of one of its buckets is None.

    >>> wire = gradwire.attach(model, "int8")
    >>> model(inputs).sum().backward()
    >>> wire.stats().num_steps, wire.stats().bytes_sent
    (1, 0)
    """

    num_steps: int
    bytes_sent: int | None
    num_messages: int | None
    wait_ms: float | None
    work_ms: float | None
    steps: tuple[StepStats, ...]
    num_skipped: int = 0
    """Steps that ``on_nonfinite="skip"`` has skipped."""
    parameters: tuple[ParameterStats, ...] = ()
    """The figures of the last step that `Telemetry` compared, parameter by parameter."""

    def __repr__(self) -> str:
        times = [f"{name}={_rounded(getattr(self, name))}" for name in ("wait_ms", "work_ms")]
        counts = [f"{name}={getattr(self, name)}" for name in ("num_steps", "bytes_sent", "num_messages")]
        return f"WireStats({', '.join([*counts, *times])}, num_skipped={self.num_skipped})"


def _rounded(time_ms: float | None) -> float | None:
    return None if time_ms is None else round(time_ms, 3)


class StatsCollector:
    """Collects the figures of buckets; may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Hooks must not spend their time on figures that nobody may read: these are sorted later, together.
        self._new: deque[tuple[int, BucketStats]] = deque()
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
        wait_ms = None if wait_s is None else 1e3 * wait_s
        work_ms = None if work_s is None else 1e3 * work_s
        self._new.append((place.step, BucketStats(place.bucket, bytes_sent, num_messages, wait_ms, work_ms)))
        if len(self._new) >= _NUM_UNSORTED:
            with self._lock:
                self._sort()

    def _sort(self) -> None:
        """Add what is new to the steps and to the totals."""
        while self._new:
            step, bucket = self._new.popleft()
            # Buckets that are exchanged at the same time, of one step or of several, may end in any order.
            recent = list(self._steps)[-_NUM_STEPS_UNDER_WAY:]
            own = next((buckets for number, buckets in recent if number == step), None)
            if own is None:
                own = []
                self._steps.append((step, own))
            bisect.insort(own, bucket, key=lambda each: each.bucket)
            figures = (bucket.bytes_sent, bucket.num_messages, bucket.wait_ms, bucket.work_ms)
            self._totals = [
                None if total is None or figure is None else total + figure
                for total, figure in zip(self._totals, figures, strict=True)
            ]

    def report(self, place: Place, traffic: Traffic, elapsed_s: float | None) -> None:
        """Add the figures of a lane's task; ``elapsed_s`` is None on CUDA, where the host does not wait."""
        wait_s = None if elapsed_s is None else traffic.wait_s
        work_s = None if elapsed_s is None else elapsed_s - traffic.wait_s
        self.record(place, traffic.bytes_sent, traffic.num_messages, wait_s, work_s)

    def of_step(self, step: int) -> dict[str, float | None]:
        """Return the totals of a recent step; a total is None if one of its figures is not known."""
        with self._lock:
            self._sort()
            buckets = next((buckets for number, buckets in reversed(self._steps) if number == step), [])
        figures: tuple[Figure, ...] = get_args(Figure)
        return {figure: total_of(buckets, figure) for figure in figures}

    def read(self, num_steps: int) -> WireStats:
        """Return everything collected so far; ``num_steps`` is the number of steps since `attach`."""
        with self._lock:
            self._sort()
            bytes_sent, num_messages, wait_ms, work_ms = self._totals
            return WireStats(
                num_steps,
                None if bytes_sent is None else int(bytes_sent),
                None if num_messages is None else int(num_messages),
                wait_ms,
                work_ms,
                tuple(StepStats(step, tuple(buckets)) for step, buckets in self._steps),
            )


def total_of(buckets: Iterable[BucketStats], figure: Figure) -> float | None:
    """Return the sum of a figure over buckets; None if it is not known of all of them."""
    total: float = 0  # bytes and messages stay whole numbers
    for bucket in buckets:
        value = getattr(bucket, figure)
        if value is None:
            return None
        total += value
    return total
