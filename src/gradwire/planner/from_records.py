"""A measured training carried to other networks: its own costs and bytes, on other links and worlds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import gradwire
from gradwire.headroom import ALLREDUCE, NOOP, Record, Row
from gradwire.lab import parse_rate
from gradwire.planner.cost import NUM_IN_FLIGHT, Cluster, Costs, Wire, predict_step
from gradwire.planner.plans import can_be_planned, wire_of
from gradwire.planner.shapes import Shape, ddp_buckets, typical_shapes

# A loopback's, where the record was taken behind a link that hides its own, and of a message.
_COPY_NS_PER_BYTE = 0.7
_MESSAGE_MS = 0.09
_ROUND_MS = 0.35


def bits_per_s(record: Record) -> float | None:
    """The link's rate, if it had one."""
    return None if record.link is None else parse_rate(record.link)


def cores_per_worker(record: Record) -> float:
    """What each rank had of its machine; on a cluster that is not known, and two are enough."""
    return record.machine.num_cores / record.world_size if record.one_machine else 2.0


def _is_known(name: str) -> bool:
    """Whether a plan can be made for it: not of schedules and routes, nor of another gradwire's recipes."""
    if name == ALLREDUCE:
        return True
    try:
        return can_be_planned(gradwire.recipe(name))
    except ValueError:
        return False


@dataclass(frozen=True)
class Forecast:
    """Step times of a record's recipes elsewhere, for the buckets and the compute time that it had.

    A record does not know the shapes of its model, so those of a transformer of that size stand in; what
    that is off for bytes and messages where they were counted, it is taken to be off elsewhere.
    """

    record: Record

    @property
    def recipes(self) -> list[Row]:
        """The rows that can be predicted: with buckets as all have them, and a recipe we know."""
        rows = [row for row in self.record.rows if row.bucket_mb == self.record.bucket_mb]
        return [row for row in rows if row.recipe != NOOP and row.bytes_per_step and _is_known(row.recipe)]

    def step_ms(self, row: Row, cluster: Cluster) -> float:
        """How long a step of this row's recipe takes there."""
        wire, costs = self._wire(row, cluster), self._costs(row)
        return 1e3 * predict_step(self.record.noop.step_ms / 1e3, wire, costs, cluster).step_s

    @cached_property
    def _shapes(self) -> list[Shape]:
        return typical_shapes(self.record.num_parameters)

    @property
    def _cut(self) -> tuple[float | None, float]:
        """How DDP made buckets of it: their size in MB, and the bytes of a value."""
        return self.record.bucket_mb, self.record.gradient_bytes / self.record.num_parameters

    @cached_property
    def _num_buckets(self) -> int:
        return len(ddp_buckets(self._shapes, *self._cut))

    def _wire(self, row: Row, cluster: Cluster) -> Wire:
        there, here = (
            wire_of(row.recipe, self._shapes, where, *self._cut)
            for where in (cluster, Cluster(self.record.world_size))
        )
        assert row.bytes_per_step is not None
        counted = row.bytes_per_step / sum(bucket.worker_bytes for bucket in here.buckets)
        met = (row.num_messages or 0) / sum(bucket.num_messages for bucket in here.buckets) or 1.0
        buckets = tuple(
            dataclasses.replace(
                bucket,
                worker_bytes=counted * bucket.worker_bytes,
                node_bytes=counted * bucket.node_bytes,
                num_rounds=met * bucket.num_rounds,
                num_messages=met * bucket.num_messages,
            )
            for bucket in there.buckets
        )
        return dataclasses.replace(there, buckets=buckets)

    def _costs(self, row: Row) -> Costs:
        record = self.record
        here = Cluster(record.world_size, cores_per_worker=cores_per_worker(record))
        copy_ns = _COPY_NS_PER_BYTE
        if record.link is None and row.bytes_per_step:
            _, moving_ms, _ = record.split_ms(row)
            if row.wait_ms is not None:  # of buckets that wait at the same time, it is the sum
                moving_ms = row.wait_ms / min(NUM_IN_FLIGHT, self._num_buckets)
            copy_ns = 1e6 * moving_ms / row.bytes_per_step / here.crowding
        work = wire_of(row.recipe, self._shapes, here).work
        # A bucket's own part is in there too.
        work_ns = 1e6 * (row.work_ms or 0.0) / (record.num_parameters * work) / here.crowding
        return Costs(work_ns, copy_ns, 0.0, _MESSAGE_MS, _ROUND_MS)
