"""Costs of recipes as a measured training found them, so that it can be carried to other networks."""

from __future__ import annotations

import math

from gradwire.headroom.records import ALLREDUCE, NOOP, Record, Row
from gradwire.lab import parse_rate
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import Costs
from gradwire.planner.plans import DEFAULT_BUCKET_MB

# A loopback's, where the record was taken behind a link that hides its own.
_COPY_NS_PER_BYTE = 0.7
_MS_PER_MESSAGE = 0.2


def calibration_of(record: Record) -> Calibration:
    """The costs of the record's recipes, with buckets as DDP makes them."""
    rows = [row for row in record.rows if row.bucket_mb == record.bucket_mb and row.recipe != NOOP]
    costs = {row.recipe: _costs(record, row) for row in rows if record.world_size > 1}
    return Calibration(str(record.machine), record.torch_version, costs)


def num_buckets(record: Record) -> int:
    """How many buckets a step has, about."""
    return math.ceil(record.gradient_bytes / 2**20 / (record.bucket_mb or DEFAULT_BUCKET_MB))


def bits_per_s(record: Record) -> float | None:
    """The link's rate, if it had one."""
    return None if record.link is None else parse_rate(record.link)


def _costs(record: Record, row: Row) -> Costs:
    part = 2 * (record.world_size - 1) / record.world_size
    values = record.gradient_bytes / 4
    copy_ns = _COPY_NS_PER_BYTE
    if record.link is None and row.bytes_per_step:
        _, exposed_ms, _ = record.split_ms(row)
        copy_ns = 1e6 * (exposed_ms if row.wait_ms is None else row.wait_ms) / row.bytes_per_step
    rounds = 2.0
    if row.recipe != ALLREDUCE and row.num_messages:
        rounds = row.num_messages / (record.world_size - 1) / num_buckets(record)
    work_ns = 1e6 * (row.work_ms or 0.0) / (values * part)
    return Costs(work_ns, copy_ns, rounds, _MS_PER_MESSAGE)
