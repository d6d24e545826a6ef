"""What a measurement found, with its conditions: values that go to a file and come back the same."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2

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
    """Of the averaged gradient, relative, in the 2-norm."""

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
    """Where it was measured."""

    cpu: str
    num_cores: int
    """Cores this process may use."""
    platform: str

    @classmethod
    def here(cls) -> Machine:
        """The machine this runs on."""
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return cls(_cpu_name(), num_cores or 1, platform.platform())

    def __str__(self) -> str:
        return f"{self.cpu}, {self.num_cores} core{'s' if self.num_cores > 1 else ''}"


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
    gradient_bytes: int
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"the world size must be at least 1, not {self.world_size}")
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

    def to_json(self) -> str:
        """The record as JSON; medians and spreads are there for the reader, samples are what counts."""
        fields = dataclasses.asdict(self)
        for row, row_fields in zip(self.rows, fields["rows"], strict=True):
            row_fields.update(step_ms=row.step_ms, spread_ms=row.spread_ms)
        return json.dumps({"schema_version": SCHEMA_VERSION, **fields}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that `to_json` wrote. Raises ValueError that says what is wrong with the text."""
        (record, *others) = read_records(text)
        if others:
            raise ValueError(f"this file has {1 + len(others)} records, of a sweep over links")
        return record


def write_records(records: Sequence[Record]) -> str:
    """One record as itself, several as a list."""
    if len(records) == 1:
        return records[0].to_json()
    return "[" + ",".join(record.to_json() for record in records) + "]\n"


def read_records(text: str) -> list[Record]:
    """What `write_records` wrote. Raises ValueError that says what is wrong with the text."""
    try:
        data = json.loads(text)
        items = data if isinstance(data, list) and data else [data]
        versions = [_take(item, "schema_version", int) for item in items]
        if set(versions) == {SCHEMA_VERSION}:
            return [_read_record(item) for item in items]
    except ValueError as error:  # JSONDecodeError is one
        raise ValueError(f"not a headroom record: {error}") from None
    raise ValueError(
        f"this headroom record has schema version {versions[0]}, and this gradwire reads version "
        f"{SCHEMA_VERSION}: read it with the gradwire that wrote it, "
        f"{items[0].get('gradwire_version', 'unknown')}"
    )


def _read_record(data: object) -> Record:
    machine = _take(data, "machine", dict)
    return Record(
        gradwire_version=_take(data, "gradwire_version", str),
        torch_version=_take(data, "torch_version", str),
        date=_take(data, "date", str),
        machine=Machine(
            _take(machine, "cpu", str), _take(machine, "num_cores", int), _take(machine, "platform", str)
        ),
        world_size=_take(data, "world_size", int),
        threads_per_rank=_take(data, "threads_per_rank", int),
        backend=_take(data, "backend", str),
        device=_take(data, "device", str),
        link=_take(data, "link", str, None),
        one_machine=_take(data, "one_machine", bool),
        interleaved=_take(data, "interleaved", bool),
        bucket_mb=_take(data, "bucket_mb", float, int, None),
        workload=_take(data, "workload", str),
        gradient_bytes=_take(data, "gradient_bytes", int),
        rows=tuple(map(_read_row, _take(data, "rows", list))),
    )


def _read_row(data: object) -> Row:
    samples = _take(data, "samples_ms", list)
    if not all(type(ms) in (int, float) for ms in samples):
        raise ValueError("'samples_ms' must be a list of numbers")
    return Row(
        recipe=_take(data, "recipe", str),
        samples_ms=tuple(map(float, samples)),
        bytes_per_step=_take(data, "bytes_per_step", int, None),
        bucket_mb=_take(data, "bucket_mb", float, int, None),
        num_messages=_take(data, "num_messages", int, None),
        wait_ms=_take(data, "wait_ms", float, int, None),
        work_ms=_take(data, "work_ms", float, int, None),
        gradient_error=_take(data, "gradient_error", float, int, None),
    )


def _take(data: object, key: str, *kinds: type | None) -> Any:
    """``data[key]`` if it is of one of the kinds; None stands for null."""
    if not isinstance(data, dict):
        raise ValueError(f"an object with {key!r} was expected, not {json.dumps(data)[:40]}")
    if key not in data:
        raise ValueError(f"{key!r} is missing")
    value = data[key]
    # By type(), as isinstance() takes True for an int.
    if (None if value is None else type(value)) not in kinds:
        expected = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise ValueError(f"{key!r} must be {expected}, not {json.dumps(value)[:40]}")
    return value
