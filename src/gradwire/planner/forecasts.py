"""Forecasts: a measured training on other links and with other numbers of workers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import gradwire
from gradwire.headroom import ALLREDUCE, NOOP, Record, Row
from gradwire.links import parse_delay, parse_rate
from gradwire.planner.cost import NUM_IN_FLIGHT, Cluster, Costs, StepTraffic, predict_step
from gradwire.planner.predictions import can_be_planned, step_traffic
from gradwire.planner.shapes import Shape, ddp_buckets, typical_shapes

# A loopback's costs of bytes and of messages, for records whose link hides them.
_COPY_NS_PER_BYTE = 0.7
_MESSAGE_MS = 0.09
_ROUND_MS = 0.35


def link_bits_per_s(record: Record) -> float | None:
    """Return the rate of the record's links; None if they had no limit."""
    return None if record.link is None else parse_rate(record.link)


def latency_s(record: Record, otherwise: float) -> float:
    """Return the time from host to host in the record's lab, or ``otherwise`` if it had no delay."""
    return otherwise if record.delay is None else parse_delay(record.delay)


def cores_per_worker(record: Record) -> float:
    """Return each rank's share of the cores; two, which are enough, if the ranks were on a cluster."""
    return record.machine.num_cores / record.world_size if record.one_machine else 2.0


def _is_known(name: str) -> bool:
    """Return True if a row can be planned for any number of workers.

    No schedule, no route, no recipe of another gradwire, and no nodes of a given size can.
    """
    if name == ALLREDUCE:
        return True
    try:
        recipe = gradwire.recipe(name)
    except (ValueError, TypeError, OverflowError, RecursionError):  # the name is text from a file
        return False
    return can_be_planned(recipe) and recipe.local_size in (None, 1)


@dataclass(frozen=True)
class Forecast:
    """Step times of a record's recipes on other clusters, with its buckets and its compute time.

    A record does not have the shapes of its model. Those of a transformer of the same size take their
    place. Bytes and messages are then scaled so that they match the record on its own cluster.
    """

    record: Record

    @property
    def recipes(self) -> list[Row]:
        """The rows that can be predicted: with the record's bucket size, and a recipe that is known."""
        if self.record.sharding is not None:
            return []  # the traffic here is DDP's
        rows = [row for row in self.record.rows if row.bucket_mb == self.record.bucket_mb]
        return [row for row in rows if row.recipe != NOOP and row.bytes_per_step and _is_known(row.recipe)]

    def step_ms(self, row: Row, cluster: Cluster) -> float:
        """Return the time of a step with this row's recipe on ``cluster``."""
        traffic, costs = self._traffic(row, cluster), self._costs(row)
        return 1e3 * predict_step(self.record.noop.step_ms / 1e3, traffic, costs, cluster).step_s

    @cached_property
    def _shapes(self) -> list[Shape]:
        return typical_shapes(self.record.num_parameters)

    @property
    def _bucket_sizes(self) -> tuple[float | None, float]:
        """The size of DDP's buckets in MB, and the bytes of a value."""
        return self.record.bucket_mb, self.record.gradient_bytes / self.record.num_parameters

    @cached_property
    def _num_buckets(self) -> int:
        return len(ddp_buckets(self._shapes, *self._bucket_sizes))

    def _traffic(self, row: Row, cluster: Cluster) -> StepTraffic:
        there, here = (
            step_traffic(row.recipe, self._shapes, where, *self._bucket_sizes)
            for where in (cluster, Cluster(self.record.world_size))
        )
        assert row.bytes_per_step is not None
        bytes_factor = row.bytes_per_step / sum(bucket.worker_bytes for bucket in here.buckets)
        num_messages = sum(bucket.num_messages for bucket in here.buckets)
        messages_factor = (row.num_messages or 0) / num_messages or 1.0
        buckets = tuple(
            dataclasses.replace(
                bucket,
                worker_bytes=bytes_factor * bucket.worker_bytes,
                node_bytes=bytes_factor * bucket.node_bytes,
                num_rounds=messages_factor * bucket.num_rounds,
                num_messages=messages_factor * bucket.num_messages,
                num_trips=messages_factor * bucket.num_trips,
            )
            for bucket in there.buckets
        )
        return dataclasses.replace(there, buckets=buckets)

    def _costs(self, row: Row) -> Costs:
        record = self.record
        here = Cluster(record.world_size, cores_per_worker=cores_per_worker(record))
        copy_ns = _COPY_NS_PER_BYTE
        if not record.network and row.bytes_per_step:
            _, moving_ms, _ = record.split_ms(row)
            if row.wait_ms is not None:  # the sum over buckets, some of which waited at the same time
                moving_ms = row.wait_ms / min(NUM_IN_FLIGHT, self._num_buckets)
            copy_ns = 1e6 * moving_ms / row.bytes_per_step / here.crowding
        work = step_traffic(row.recipe, self._shapes, here).work
        # This includes the fixed costs of buckets.
        work_ns = 1e6 * (row.work_ms or 0.0) / (record.num_parameters * work) / here.crowding
        return Costs(work_ns, copy_ns, 0.0, _MESSAGE_MS, _ROUND_MS)
