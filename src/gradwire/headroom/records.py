"""Records: the figures of a measurement, with its conditions."""

from __future__ import annotations

import math
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

import gradwire
from gradwire.links import parse_delay, parse_rate
from gradwire.tuning import DecisionSummary

ALLREDUCE = "allreduce"
"""Name of the row of plain DDP, without any hook."""
NOOP = "noop"
"""Name of the row of steps whose gradients are not sent."""
ALONE = "alone"
"""Name of the row of ranks that train by themselves, beside those of a sharded model."""
# What a recipe shortens, the name of torch's own averaging, and what stays as it is; by sharding.
_WORDS = {
    None: ("Communication", "plain DDP", ""),
    "fsdp": ("The reduce-scatter of gradients", "plain FSDP2", "all-gathers of parameters"),
    "hsdp": ("The average between replicas", "plain HSDP", "gathers and reductions within replicas"),
}


def row_name(recipe: gradwire.Recipe | str | None) -> str:
    """Return the name of a recipe's row; None is plain DDP."""
    return ALLREDUCE if recipe is None else str(recipe)


@dataclass(frozen=True)
class Row:
    """The step times of one recipe. Raises ValueError if there are none, or if one is not positive."""

    recipe: str
    samples_ms: tuple[float, ...]
    """The slowest rank's time of each step. In an interleaved record, samples of one index were taken
    within the same few seconds in all rows."""
    bytes_per_step: int | None
    """Bytes that the busiest rank sends in a step; None if unknown."""
    bucket_mb: float | None = None
    """DDP's bucket_cap_mb; None is DDP's own default, whose first bucket is smaller."""
    num_messages: int | None = None
    """Messages that a rank sends in a step; None if unknown."""
    wait_ms: float | None = None
    """Time in a step that buckets wait for other ranks, most of it during the backward pass; None if
    unknown."""
    work_ms: float | None = None
    """Time in a step that buckets are encoded, summed and decoded, most of it during the backward pass;
    None if unknown."""
    gradient_error: float | None = None
    """Relative error of the first step's averaged gradient, in the 2-norm; None if unknown. For recipe
    ``auto``, the error that its budget bounds, with the encodings of the last step."""
    decisions: tuple[tuple[DecisionSummary, ...], ...] = ()
    """The decisions of recipe ``auto`` for each model of a script; empty if there are none."""

    def __post_init__(self) -> None:
        if not self.samples_ms:
            raise ValueError(f"row {self.recipe!r} has no samples")
        if not all(math.isfinite(ms) and ms > 0 for ms in self.samples_ms):
            raise ValueError(f"row {self.recipe!r} has a sample that is not a positive number of ms")

    @property
    def step_ms(self) -> float:
        """The median step time."""
        return statistics.median(self.samples_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of the step times."""
        if len(self.samples_ms) == 1:
            return self.samples_ms[0], self.samples_ms[0]
        deciles = statistics.quantiles(self.samples_ms, n=10, method="inclusive")
        return deciles[0], deciles[-1]


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement. Raises ValueError if it has no cores."""

    cpu: str
    num_cores: int
    """Cores this process may use."""
    platform: str

    def __post_init__(self) -> None:
        if self.num_cores < 1:
            raise ValueError(f"a machine has at least one core, not {self.num_cores}")

    @classmethod
    def here(cls) -> Machine:
        """Return the machine that this process runs on."""
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return cls(_cpu_name(), num_cores or 1, platform.platform())

    def __str__(self) -> str:
        return f"{self.cpu}, {self.num_cores} core{'s' if self.num_cores > 1 else ''}"


def ring_bytes(gradient_bytes: int, world_size: int) -> int:
    """Return the bytes that a rank sends to average in a ring, as plain DDP does."""
    return 2 * (world_size - 1) * gradient_bytes // world_size


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Proposal:
    """The encodings that recipe ``auto`` would choose, on a link where only bytes count."""

    recipe: str
    """``auto`` with its options."""
    bytes_per_step: int
    """Bytes that the busiest rank would send in a step."""
    error: float | None
    """The relative error that the budget bounds; None if the gradient is zero."""
    counts: tuple[tuple[str, int], ...]
    """The number of parameters of each encoding."""


@dataclass(frozen=True)
class Record:
    """One measurement. Raises ValueError if its rows do not belong together or a baseline is missing."""

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
    """True if all ranks were on this machine."""
    interleaved: bool
    """True if rows took turns; False if they ran one after the other."""
    bucket_mb: float | None
    """DDP's bucket_cap_mb of the two baselines; other rows may differ."""
    workload: str
    num_parameters: int
    """Number of trained parameters; a complex one may count as two."""
    gradient_bytes: int
    rows: tuple[Row, ...]
    delay: str | None = None
    """The time from host to host in the lab; None for the network as it is."""
    proposal: Proposal | None = None
    """The choice of recipe ``auto``; None if nobody asked for it."""
    sharding: str | None = None
    """``fsdp`` or ``hsdp`` if ``fully_shard`` has sharded the model; None for DDP."""
    no_proposal: str | None = None
    """The models, all or some, that the proposal leaves out, and why, in a sentence; None otherwise."""
    num_layers: int | None = None
    """Number of layers that `gradwire.DiLoCo` can divide the model into; None if unknown."""
    takes_turns: bool = False
    """True if ranks took turns on a GPU, and messages waited for turns."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"the world size must be at least 1, not {self.world_size}")
        if self.gradient_bytes < 1 or self.num_parameters < 1:
            raise ValueError(
                f"a record needs gradients to average, not {self.gradient_bytes} bytes of "
                f"{self.num_parameters} parameters"
            )
        if self.sharding not in _WORDS:
            raise ValueError(f"the sharding must be fsdp or hsdp, not {self.sharding!r}")
        if self.link is not None:
            parse_rate(self.link)
        if self.delay is not None:
            parse_delay(self.delay)
        names = [self.label(row) for row in self.rows]
        for baseline in (ALLREDUCE, NOOP):
            if names.count(baseline) != 1:
                raise ValueError(f"a record needs one row {baseline!r} to compare with; it has {names}")
        if len(set(names)) != len(names):
            raise ValueError(f"a record may have each row only once; it has {names}")
        if len({len(row.samples_ms) for row in self.rows}) != 1:
            raise ValueError("the rows have different numbers of samples, so they were not taken together")

    @property
    def network(self) -> str:
        """The links of the lab in words; empty for the network as it is."""
        if self.link is None and self.delay is None:
            return ""
        links = "links without a limit" if self.link is None else f"links of {self.link}"
        return links if self.delay is None else f"{links}, {self.delay} long"

    @property
    def averaging(self) -> str:
        """The communication that a recipe shortens, in words."""
        return _WORDS[self.sharding][0]

    @property
    def plain(self) -> str:
        """The name of torch's own averaging: plain DDP, or that of a sharded model."""
        return _WORDS[self.sharding][1]

    @property
    def remainder(self) -> tuple[str, float] | None:
        """The communication that no recipe shortens and its share of a plain step; None if there is none."""
        alone = next((row for row in self.rows if row.recipe == ALONE), None)
        if alone is None:
            return None
        return _WORDS[self.sharding][2], max(0.0, self.noop.step_ms - alone.step_ms) / self.allreduce.step_ms

    @property
    def allreduce(self) -> Row:
        """The row of torch's own averaging."""
        return next(row for row in self.rows if self.label(row) == ALLREDUCE)

    @property
    def noop(self) -> Row:
        """The row without communication."""
        return next(row for row in self.rows if row.recipe == NOOP)

    @property
    def recipes(self) -> tuple[Row, ...]:
        """All rows but the baselines: recipes, and plain DDP with other bucket sizes."""
        return tuple(row for row in self.rows if self.label(row) not in (ALLREDUCE, NOOP, ALONE))

    def label(self, row: Row) -> str:
        """Return a row's recipe, with its bucket size if that is not the record's."""
        if row.bucket_mb == self.bucket_mb:
            return row.recipe
        return f"{row.recipe}, {'default' if row.bucket_mb is None else f'{row.bucket_mb:g} MB'}"

    def gain(self, row: Row) -> float:
        """Return how many times as fast as plain DDP a step is."""
        return self.allreduce.step_ms / row.step_ms

    def communication_share(self, row: Row) -> float:
        """Return the share of a step, from 0 to 1, that communication costs."""
        return max(0.0, 1 - self.noop.step_ms / row.step_ms)

    def split_ms(self, row: Row) -> tuple[float, float, float]:
        """Split a step into compute, exposed communication and overhead, which add up to its time.

        Compute is a step without communication. The rest is split in proportion to the waiting and the
        working of the buckets. If those are unknown, all of the rest counts as communication.
        """
        compute = min(row.step_ms, self.noop.step_ms)
        rest = row.step_ms - compute
        working = 0.0
        if row.wait_ms is not None and row.work_ms:
            working = rest * row.work_ms / (row.wait_ms + row.work_ms)
        return compute, rest - working, working
