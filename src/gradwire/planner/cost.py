"""The cost model: the time of a step, from bytes, messages, a link and the speed of kernels. No torch.

A backward pass produces its buckets one after the other. They are averaged in that order, two at a time,
while the backward pass goes on. The step ends when the last bucket is averaged. A bucket costs

    CPU       a recipe's ns per value (encode, sum, decode), ns per byte (sockets), ms per message, and ms
              per bucket
    link      the bytes that leave its node over the link's rate, less the share of headers; or all of its
              bytes over the speed of sockets, if that takes longer
    latency   for each round the time to wake up for a message, and one or two latencies of the link; the
              messages of one round travel together. Small messages on far links take one: their receives
              are posted ahead of time

Only one bucket at a time uses the CPU, and only one the link. While one uses the link, another can use the
CPU.

A worker with fewer than two cores cannot compute and average at once, so averaging delays its backward
pass. Workers with less than one core each share cores, and their CPU times grow accordingly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# TCP carries 1448 bytes in an Ethernet frame of 1514.
_GOODPUT = 1448 / 1514
# A backward pass takes about twice as long as a forward pass: two products for each of the forward's one.
BACKWARD_SHARE = 2 / 3
# Gloo sends a message when it knows of its receive, and that news takes as long as the message. In a ring,
# every round waits for both.
RING_TRIPS = 2.0
# A worker lane averages two buckets at once, and so do the two threads of torch's own Gloo groups.
NUM_IN_FLIGHT = 2
# More than any cluster has, and still planned in seconds: the messages of each worker are counted.
MAX_WORKERS = 200_000


@dataclass(frozen=True)
class Cluster:
    """Workers, and the links between their nodes. Raises ValueError for numbers that cannot be."""

    num_nodes: int
    workers_per_node: int = 1
    bits_per_s: float | None = None
    """Rate of each node's link, in either direction; None if only the speed of sockets limits it."""
    latency_s: float = 50e-6
    """Latency between nodes, one way."""
    cores_per_worker: float = 2.0
    many_to_one: float = 0.17
    """Where messages of n nodes meet, ``n ** -many_to_one`` of a link's rate is left. It was fitted in the
    lab by benchmarks/many_to_one.py, on cases other than those that validate predictions."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.workers_per_node < 1:
            raise ValueError(
                f"a cluster has at least one node and one worker on each, not {self.num_nodes} and "
                f"{self.workers_per_node}"
            )
        if self.num_nodes * self.workers_per_node > MAX_WORKERS:
            raise ValueError(
                f"a cluster has at most {MAX_WORKERS} workers, not {self.num_nodes * self.workers_per_node}"
            )
        if self.bits_per_s is not None and not self.bits_per_s > 0:
            raise ValueError(f"a link's rate must be above 0, not {self.bits_per_s}")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"the latency must be at least 0 and finite, not {self.latency_s}")
        if not self.cores_per_worker > 0:
            raise ValueError(f"the cores per worker must be above 0, not {self.cores_per_worker}")

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.workers_per_node

    @property
    def crowding(self) -> float:
        """Factor by which CPU times grow if a worker has less than one core."""
        return max(1.0, 1 / self.cores_per_worker)

    @property
    def contention(self) -> float:
        """Share of the CPU time of averaging that delays the backward: 1 with one core, 0 with two."""
        # Two threads on c cores run at c/2 each: while one works for w, the other loses w (2/c - 1).
        return min(1.0, max(0.0, 2 / self.cores_per_worker - 1))

    def link_s(self, num_bytes: float, num_meeting: int) -> float:
        """Return the seconds that bytes take to leave a node through its link.

        ``num_meeting`` is that of a `StepTraffic`. Two nodes send each other one message at a time.
        """
        if self.bits_per_s is None:
            return 0.0
        share = num_meeting**-self.many_to_one if num_meeting > 2 else 1.0
        return 8 * num_bytes / (self.bits_per_s * _GOODPUT * share)


@dataclass(frozen=True)
class Costs:
    """The costs of a recipe besides its bytes, calibrated between two ranks."""

    work_ns_per_value: float
    """CPU time to encode, sum and decode a value."""
    copy_ns_per_byte: float
    """CPU time to send one byte through a socket and to receive another."""
    bucket_ms: float
    """CPU time of an almost empty bucket, without its messages."""
    message_ms: float
    """CPU time to send one almost empty message and to receive another, among many at once."""
    round_ms: float
    """Time to wait for almost empty messages, over links without latency."""


@dataclass(frozen=True)
class BucketTraffic:
    """The bytes and messages of one bucket in one step."""

    num_values: int
    worker_bytes: float
    """Bytes that a worker sends, on any link."""
    node_bytes: float
    """Bytes that all workers of a node together send to other nodes."""
    num_rounds: float
    num_messages: float
    """Messages that a worker sends."""
    num_trips: float
    """Times that something goes from node to node before the next can: a message, or news of a receive."""


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one step, and a worker's share of the work."""

    buckets: tuple[BucketTraffic, ...]
    """In the order in which they are averaged."""
    work: float = 1.0
    """A worker's work relative to that of each of two workers."""
    num_meeting: int = 1
    """The number of nodes that send to one another at once; 1 in a ring, where each sends to the next."""


@dataclass(frozen=True)
class Prediction:
    """One predicted step."""

    step_s: float
    compute_s: float
    bytes_per_step: int
    """Bytes that a node sends through its link."""
    num_messages: int
    """Messages that a worker sends."""
    gathered_bytes: int = 0
    """The part of the bytes that are parameters of a sharded model."""

    @property
    def efficiency(self) -> float:
        """The scaling efficiency: the share of compute in a step, from 0 to 1."""
        return self.compute_s / self.step_s


@dataclass(frozen=True)
class BucketTimes:
    """The times of one bucket, in seconds."""

    cpu_s: float
    """CPU time besides that of moving bytes."""
    copy_s: float
    """CPU time of moving bytes."""
    moving_s: float
    """Time that the bytes take, on the link or through sockets."""
    waking_s: float

    @property
    def total_s(self) -> float:
        """The time of a bucket that nothing runs beside."""
        return self.cpu_s + self.moving_s + self.waking_s


def bucket_times(
    bucket: BucketTraffic, costs: Costs, cluster: Cluster, work: float = 1.0, num_meeting: int = 1
) -> BucketTimes:
    """Return the times of a bucket; ``work`` and ``num_meeting`` are those of a `StepTraffic`."""
    copy_s = 1e-9 * costs.copy_ns_per_byte * bucket.worker_bytes * cluster.crowding
    cpu_s = 1e-9 * costs.work_ns_per_value * bucket.num_values * work
    cpu_s += 1e-3 * (costs.bucket_ms + costs.message_ms * bucket.num_messages)
    return BucketTimes(
        cpu_s * cluster.crowding,
        copy_s,
        max(cluster.link_s(bucket.node_bytes, num_meeting), copy_s),
        bucket.num_trips * cluster.latency_s + bucket.num_rounds * 1e-3 * costs.round_ms,
    )


def predict_step(compute_s: float, traffic: StepTraffic, costs: Costs, cluster: Cluster) -> Prediction:
    """Predict a step whose forward and backward alone take ``compute_s``."""
    if cluster.num_workers == 1:
        return Prediction(compute_s, compute_s, 0, 0)
    total_values = max(1, sum(bucket.num_values for bucket in traffic.buckets))
    num_seen, lost_s, cpu_free_s, link_free_s = 0, 0.0, 0.0, 0.0
    ends_s = [0.0] * NUM_IN_FLIGHT
    for bucket in traffic.buckets:
        num_seen += bucket.num_values
        ready_s = compute_s * (1 - BACKWARD_SHARE * (1 - num_seen / total_values)) + lost_s
        begin_s = max(ready_s, ends_s[-NUM_IN_FLIGHT])
        times = bucket_times(bucket, costs, cluster, traffic.work, traffic.num_meeting)
        cpu_free_s = max(cpu_free_s, begin_s) + times.cpu_s + cluster.contention * times.copy_s
        link_free_s = max(link_free_s, begin_s) + times.moving_s
        ends_s.append(max(begin_s + times.total_s, cpu_free_s, link_free_s))
        lost_s += cluster.contention * (times.cpu_s + times.copy_s)
    step_s = max(compute_s + lost_s, *ends_s)
    num_bytes = round(sum(bucket.node_bytes for bucket in traffic.buckets))
    return Prediction(step_s, compute_s, num_bytes, round(sum(b.num_messages for b in traffic.buckets)))
