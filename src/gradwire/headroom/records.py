"""What a measurement found, with its conditions."""

from __future__ import annotations

import math
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

from gradwire.lab import parse_rate

ALLREDUCE = "allreduce"
"""The row of plain DDP, without any hook."""
NOOP = "noop"
"""The row of steps that do not communicate."""


@dataclass(frozen=True)
class Row:
    """The step times of one recipe. Raises ValueError without samples, or if one is no time."""

    recipe: str
    samples_ms: tuple[float, ...]
    """Each timed step, as long as the slowest rank took. Samples of one index, in all rows of a record,
    were taken within the same few seconds."""
    bytes_per_step: int | None
    """What the busiest rank sends; None when unknown, as for all that follows."""
    bucket_mb: float | None = None
    """DDP's bucket_cap_mb; None is DDP's own default, whose first bucket is smaller."""
    num_messages: int | None = None
    """What a rank sends in a step."""
    wait_ms: float | None = None
    """A step's waiting for peers, most of it beside the backward pass."""
    work_ms: float | None = None
    """A step's encoding, summing and decoding, most of it beside the backward pass."""
    gradient_error: float | None = None
    """Of the first step's averaged gradient, relative, in the 2-norm."""

    def __post_init__(self) -> None:
        if not self.samples_ms:
            raise ValueError(f"row {self.recipe!r} has no samples")
        if not all(math.isfinite(ms) and ms > 0 for ms in self.samples_ms):
            raise ValueError(f"row {self.recipe!r} has a sample that is not a positive number of ms")

    @property
    def step_ms(self) -> float:
        """The median."""
        return statistics.median(self.samples_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """The 10th and the 90th percentile."""
        if len(self.samples_ms) == 1:
            return self.samples_ms[0], self.samples_ms[0]
        deciles = statistics.quantiles(self.samples_ms, n=10, method="inclusive")
        return deciles[0], deciles[-1]


@dataclass(frozen=True)
class Machine:
    """Where it was measured. Raises ValueError for one without cores."""

    cpu: str
    num_cores: int
    """Cores this process may use."""
    platform: str

    def __post_init__(self) -> None:
        if self.num_cores < 1:
            raise ValueError(f"a machine has at least one core, not {self.num_cores}")

    @classmethod
    def here(cls) -> Machine:
        """The machine this runs on."""
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return cls(_cpu_name(), num_cores or 1, platform.platform())

    def __str__(self) -> str:
        return f"{self.cpu}, {self.num_cores} core{'s' if self.num_cores > 1 else ''}"


def ring_bytes(gradient_bytes: int, world_size: int) -> int:
    """What a rank sends to average by a ring, as plain DDP does."""
    return 2 * (world_size - 1) * gradient_bytes // world_size


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Record:
    """One measurement. Raises ValueError when rows do not belong together, or a baseline is missing."""

    gradwire_version: str
    torch_version: str
    date: str
    """ISO 8601, in UTC."""
    machine: Machine
    world_size: int
    threads_per_rank: int
    backend: str
    device: str
    """``cpu``, or the name of the GPU."""
    link: str | None
    """The rate of each rank's link in the lab; None for the network as it is."""
    one_machine: bool
    """Whether all ranks were on this machine."""
    interleaved: bool
    """Whether rows took turns; else they ran one after the other."""
    bucket_mb: float | None
    """Of the rows that are compared with; other rows may differ."""
    workload: str
    num_parameters: int
    """That are trained; a complex one may count as two."""
    gradient_bytes: int
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"the world size must be at least 1, not {self.world_size}")
        if self.gradient_bytes < 1 or self.num_parameters < 1:
            raise ValueError(
                f"there must be gradients to average, not {self.gradient_bytes} bytes of "
                f"{self.num_parameters} parameters"
            )
        if self.link is not None:
            parse_rate(self.link)
        names = [self.label(row) for row in self.rows]
        for baseline in (ALLREDUCE, NOOP):
            if names.count(baseline) != 1:
                raise ValueError(f"a record needs one row {baseline!r}, to compare with; it has {names}")
        if len(set(names)) != len(names):
            raise ValueError(f"a record has each row once, not {names}")
        if len({len(row.samples_ms) for row in self.rows}) != 1:
            raise ValueError("the rows have different numbers of samples, so they were not taken together")

    @property
    def allreduce(self) -> Row:
        """Plain DDP."""
        return next(row for row in self.rows if self.label(row) == ALLREDUCE)

    @property
    def noop(self) -> Row:
        """No communication."""
        return next(row for row in self.rows if row.recipe == NOOP)

    @property
    def recipes(self) -> tuple[Row, ...]:
        """All other rows: recipes, and plain DDP with other buckets."""
        return tuple(row for row in self.rows if self.label(row) not in (ALLREDUCE, NOOP))

    def label(self, row: Row) -> str:
        """A row's name: its recipe, and its buckets where they are not those of the others."""
        if row.bucket_mb == self.bucket_mb:
            return row.recipe
        return f"{row.recipe}, {'default' if row.bucket_mb is None else f'{row.bucket_mb:g} MB'}"

    def gain(self, row: Row) -> float:
        """How many times faster than plain DDP a step is."""
        return self.allreduce.step_ms / row.step_ms

    def communication_share(self, row: Row) -> float:
        """The part of a step, from 0 to 1, that it would not take without communication."""
        return max(0.0, 1 - self.noop.step_ms / row.step_ms)

    def split_ms(self, row: Row) -> tuple[float, float, float]:
        """A step's compute, exposed communication and overhead; they add up to its time.

        Compute is a step without communication. The rest is split as the wire's own time is, into
        waiting and working; all of it is communication where that is not known.
        """
        compute = min(row.step_ms, self.noop.step_ms)
        rest = row.step_ms - compute
        working = 0.0
        if row.wait_ms is not None and row.work_ms:
            working = rest * row.work_ms / (row.wait_ms + row.work_ms)
        return compute, rest - working, working
