"""The cost model: how long a step takes, from bytes, messages, a link and the speed of kernels. No torch.

A backward pass hands out its buckets one after the other, evenly. They are averaged in that order, one at
a time, beside the rest of the backward pass; the step ends when both have. A bucket costs

    work      its values times a recipe's ns per value: encode, sum and decode. Of n ranks each does
              (n - 1)/n of what the formula counts, as in a reduce-scatter and an all-gather
    wire      its bytes over the link's rate, less what headers take, or over what sockets can copy
    latency   once for each of its rounds, and some CPU time for each message

Workers with less than two cores each cannot compute and work at once: there, work delays the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of an Ethernet frame of 1514 bytes, TCP carries 1448.
_GOODPUT = 1448 / 1514
# Where more than two workers send to each other directly, messages meet at their receivers: of a link's rate
# all was left in the lab with 3 hosts, and 76 to 87 % with 4 and 8. A ring has one sender for each receiver.
_MANY_TO_ONE = 0.9
# A step's backward takes about twice its forward: two products for each of the forward's one.
_BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Cluster:
    """Workers, and the links between their nodes. Raises ValueError for what cannot be."""

    num_nodes: int
    workers_per_node: int = 1
    bits_per_s: float | None = None
    """Of each node's link, in either direction; None for no limit but what sockets can copy."""
    latency_s: float = 50e-6
    """One way, between nodes."""
    cores_per_worker: float = 2.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.workers_per_node < 1:
            raise ValueError(
                f"a cluster has at least one node and one worker on each, not {self.num_nodes} and "
                f"{self.workers_per_node}"
            )
        if self.bits_per_s is not None and not self.bits_per_s > 0:
            raise ValueError(f"a link's rate must be above 0, not {self.bits_per_s}")
        if not (self.latency_s >= 0 and self.cores_per_worker > 0):
            raise ValueError("latency and cores per worker cannot be negative, nor the cores 0")

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.workers_per_node

    def link_s(self, num_bytes: float, is_ring: bool) -> float:
        """How long a worker's bytes take through its node's link, which all its workers share."""
        if self.bits_per_s is None or self.num_nodes == 1:
            return 0.0
        rate = self.bits_per_s * _GOODPUT
        if is_ring:
            # One worker of a node sends to the next node; the others to their neighbours.
            return 8 * num_bytes / rate
        leaving = (self.num_workers - self.workers_per_node) / (self.num_workers - 1)
        if self.num_workers > 2:
            rate *= _MANY_TO_ONE
        return 8 * num_bytes * leaving * self.workers_per_node / rate


@dataclass(frozen=True)
class Costs:
    """What a recipe costs beside its bytes, as a calibration between two ranks found it."""

    work_ns_per_value: float
    copy_ns_per_byte: float
    """What it takes to move a byte where the link is not the limit."""
    rounds_per_bucket: float
    """Messages to each peer."""
    ms_per_message: float
    """Of a message with next to nothing in it."""


@dataclass(frozen=True)
class Wire:
    """What one worker sends in a step: values and bytes of each bucket, in the order they are averaged."""

    bucket_values: tuple[int, ...]
    bucket_bytes: tuple[int, ...]
    is_ring: bool = False
    """Whether rounds follow each other round a ring, 2 (n - 1) of them, as in an allreduce."""


@dataclass(frozen=True)
class Prediction:
    """One step."""

    step_s: float
    compute_s: float
    bytes_per_step: int
    num_messages: int

    @property
    def efficiency(self) -> float:
        """Of scaling: the compute's part of a step, from 0 to 1."""
        return self.compute_s / self.step_s


def predict_step(compute_s: float, wire: Wire, costs: Costs, cluster: Cluster) -> Prediction:
    """The time of a step whose forward and backward alone take ``compute_s``."""
    n = cluster.num_workers
    if n == 1:
        return Prediction(compute_s, compute_s, 0, 0)
    rounds = 2 * (n - 1) if wire.is_ring else costs.rounds_per_bucket
    num_messages = rounds if wire.is_ring else rounds * (n - 1)
    # Measured between two ranks, of which each did one half.
    part = 2 * (n - 1) / n
    crowding = max(1.0, 1 / cluster.cores_per_worker)
    total_values = max(1, sum(wire.bucket_values))
    seen, lane_free_s, stolen_s = 0, 0.0, 0.0
    for values, num_bytes in zip(wire.bucket_values, wire.bucket_bytes, strict=True):
        seen += values
        ready_s = compute_s * (1 - _BACKWARD_SHARE * (1 - seen / total_values)) + stolen_s
        work_s = 1e-9 * costs.work_ns_per_value * values * part * crowding
        copy_s = 1e-9 * costs.copy_ns_per_byte * num_bytes * crowding
        waiting_s = max(cluster.link_s(num_bytes, wire.is_ring), copy_s) + rounds * cluster.latency_s
        waiting_s += 1e-3 * costs.ms_per_message * num_messages * crowding
        lane_free_s = max(lane_free_s, ready_s) + work_s + waiting_s
        if cluster.cores_per_worker < 2:
            stolen_s += work_s
    step_s = max(compute_s + stolen_s, lane_free_s)
    messages_in_all = round(num_messages * len(wire.bucket_values))
    return Prediction(step_s, compute_s, sum(wire.bucket_bytes), messages_in_all)


def even_buckets(num_values: int, values_per_bucket: int) -> tuple[int, ...]:
    """A model's values cut into buckets of one size, the rest in the last.

    >>> even_buckets(10, 4)
    (4, 4, 2)
    """
    full, rest = divmod(num_values, values_per_bucket)
    sizes: Sequence[int] = [values_per_bucket] * full + [rest] * (rest > 0)
    return tuple(sizes)
