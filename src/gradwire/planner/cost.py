"""The cost model: how long a step takes, from bytes, messages, a link and the speed of kernels. No torch.

A backward pass hands out its buckets one after the other. They are averaged in that order, two at a time,
beside the rest of the backward pass; the step ends when both have. A bucket costs

    CPU       its values times a recipe's ns per value (encode, sum and decode), its bytes through sockets,
              something for each message, and something for being a bucket
    wire      the bytes that leave its node over the link's rate, less what headers take, or all of its bytes
              over what sockets can copy, whichever is longer
    latency   for each of its rounds the link's, and that of waking up for what has arrived; messages of one
              round travel together

One bucket after the other has the CPU, and the link; but while one has the link, another can have the CPU.

Workers with less than two cores each cannot compute and do that at once: there, all of it delays the
backward. With less than one core each they share them, and their CPU takes as many times longer.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of an Ethernet frame of 1514 bytes, TCP carries 1448.
_GOODPUT = 1448 / 1514
# A step's backward takes about twice its forward: two products for each of the forward's one.
_BACKWARD_SHARE = 2 / 3
# Buckets that are averaged at once: by a worker lane, and by the two threads of torch's own Gloo groups.
NUM_IN_FLIGHT = 2


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
    many_to_one: float = 0.84
    """What is left of a link's rate where messages of several nodes meet at one. Fitted in the lab by
    benchmarks/many_to_one.py, on other cases than those that predictions are compared with."""

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

    @property
    def crowding(self) -> float:
        """How many times longer what needs a core takes, where a worker has less than one."""
        return max(1.0, 1 / self.cores_per_worker)

    @property
    def contention(self) -> float:
        """Of the CPU time of averaging, what the backward loses: all with one core, nothing with two."""
        # Two threads on c cores run at c/2 each: while one does w, the other is kept from w (2/c - 1).
        return min(1.0, max(0.0, 2 / self.cores_per_worker - 1))

    def link_s(self, num_bytes: float, messages_meet: bool) -> float:
        """How long what leaves a node takes through its link."""
        if self.bits_per_s is None:
            return 0.0
        return 8 * num_bytes / (self.bits_per_s * _GOODPUT * (self.many_to_one if messages_meet else 1.0))


@dataclass(frozen=True)
class Costs:
    """What a recipe costs beside its bytes, as a calibration between two ranks found it."""

    work_ns_per_value: float
    """CPU: encode, sum and decode."""
    copy_ns_per_byte: float
    """CPU: through sockets, of a byte sent and another received."""
    bucket_ms: float
    """CPU: a bucket with next to nothing in it, but for its messages."""
    message_ms: float
    """CPU: a message sent and another received, with next to nothing in them, among many at once."""
    round_ms: float
    """Waiting for messages with next to nothing in them, where links have no latency."""


@dataclass(frozen=True)
class Bucket:
    """What one bucket costs a worker and its node."""

    num_values: int
    worker_bytes: float
    """That a worker sends, to whomever."""
    node_bytes: float
    """That all workers of a node together send to other nodes."""
    num_rounds: float
    num_messages: float
    """That a worker sends."""


@dataclass(frozen=True)
class Wire:
    """What one step sends: its buckets, in the order in which they are averaged."""

    buckets: tuple[Bucket, ...]
    work: float = 1.0
    """A worker's part of the work, of what each of two does."""
    messages_meet: bool = False
    """Whether a node gets messages from several others at once."""


@dataclass(frozen=True)
class Prediction:
    """One step."""

    step_s: float
    compute_s: float
    bytes_per_step: int
    """That a node sends through its link."""
    num_messages: int
    """That a worker sends."""

    @property
    def efficiency(self) -> float:
        """Of scaling: the compute's part of a step, from 0 to 1."""
        return self.compute_s / self.step_s


def predict_step(compute_s: float, wire: Wire, costs: Costs, cluster: Cluster) -> Prediction:
    """The time of a step whose forward and backward alone take ``compute_s``."""
    if cluster.num_workers == 1:
        return Prediction(compute_s, compute_s, 0, 0)
    total_values = max(1, sum(bucket.num_values for bucket in wire.buckets))
    seen, lost_s, cpu_free_s, link_free_s = 0, 0.0, 0.0, 0.0
    ends_s = [0.0] * NUM_IN_FLIGHT
    for bucket in wire.buckets:
        seen += bucket.num_values
        ready_s = compute_s * (1 - _BACKWARD_SHARE * (1 - seen / total_values)) + lost_s
        begin_s = max(ready_s, ends_s[-NUM_IN_FLIGHT])
        copy_s = 1e-9 * costs.copy_ns_per_byte * bucket.worker_bytes * cluster.crowding
        cpu_s = 1e-9 * costs.work_ns_per_value * bucket.num_values * wire.work
        cpu_s += 1e-3 * (costs.bucket_ms + costs.message_ms * bucket.num_messages)
        cpu_s *= cluster.crowding
        moving_s = max(cluster.link_s(bucket.node_bytes, wire.messages_meet), copy_s)
        waking_s = bucket.num_rounds * (cluster.latency_s + 1e-3 * costs.round_ms)
        cpu_free_s = max(cpu_free_s, begin_s) + cpu_s + cluster.contention * copy_s
        link_free_s = max(link_free_s, begin_s) + moving_s
        ends_s.append(max(begin_s + cpu_s + moving_s + waking_s, cpu_free_s, link_free_s))
        lost_s += cluster.contention * (cpu_s + copy_s)
    step_s = max(compute_s + lost_s, *ends_s)
    num_bytes = round(sum(bucket.node_bytes for bucket in wire.buckets))
    return Prediction(step_s, compute_s, num_bytes, round(sum(b.num_messages for b in wire.buckets)))
