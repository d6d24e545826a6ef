"""The cost model of a sharded step: `cost` with all-gathers of parameters. No torch.

Parameters of a block are gathered before its forward pass, and again before its backward pass if they were
freed in between. On CPU, computing waits for torch's gathers; gradwire's run while the block before is
computed. Gradients of a block are averaged after its backward pass. Averages by a recipe run beside the
passes of earlier blocks, torch's own do not. With replicas, torch first reduces the gradients within a
replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.planner.cost import (
    BACKWARD_SHARE,
    NUM_IN_FLIGHT,
    BucketTraffic,
    Cluster,
    Costs,
    Prediction,
    bucket_times,
)

# The share of a link's rate that Gloo's ring all-gather uses: 38 MB took 4.6 s at 100 Mbit/s, and 0.47 s at
# 1 Gbit/s (benchmarks/sharded.py).
_RING_GATHER = 0.68


@dataclass(frozen=True)
class UnitTraffic:
    """The traffic of the parameters that one ``fully_shard`` call shards."""

    gather: BucketTraffic
    num_gathers: int
    average: BucketTraffic | None
    """The average by a recipe, over shards or between replicas; None if there is nobody to average with."""
    within: BucketTraffic | None = None
    """The reduction within a replica, by torch."""


@dataclass(frozen=True)
class ShardedTraffic:
    """The traffic of one step of a sharded model."""

    units: tuple[UnitTraffic, ...]
    """In the order of the forward pass."""
    work: float = 1.0
    num_meeting: int = 1
    """Both as in `StepTraffic`."""
    num_left: int | None = None
    """The number of averages beside which computing goes on: none for torch's own. None for any number.

    The oldest of them ends before the next one begins, which needs memory."""
    gathers_ahead: bool = False
    """True if the next unit is gathered while one is computed."""


@dataclass(frozen=True)
class ShardedCosts:
    """The costs of what a sharded step exchanges."""

    average: Costs
    gather: Costs
    torch: Costs
    """The costs of torch's own reductions."""


def predict_sharded_step(
    compute_s: float, traffic: ShardedTraffic, costs: ShardedCosts, cluster: Cluster
) -> Prediction:
    """Predict a step whose forward and backward alone take ``compute_s``."""
    step = _Step(traffic, costs, cluster)
    step.run_pass(traffic.units, compute_s * (1 - BACKWARD_SHARE), is_backward=False)
    step.run_pass(traffic.units[::-1], compute_s * BACKWARD_SHARE, is_backward=True)
    parts = [part for unit in traffic.units for part in (unit.average, unit.within) if part is not None]
    gathers = [(unit.num_gathers, unit.gather) for unit in traffic.units]
    gathered = sum(times * gather.node_bytes for times, gather in gathers)
    return Prediction(
        max(step.now_s, *step.ends_s),
        compute_s,
        round(gathered + sum(part.node_bytes for part in parts)),
        round(sum(n * gather.num_messages for n, gather in gathers) + sum(p.num_messages for p in parts)),
        round(gathered),
    )


class _Step:
    """The times of one step, as far as it has come."""

    def __init__(self, traffic: ShardedTraffic, costs: ShardedCosts, cluster: Cluster) -> None:
        self.now_s = 0.0
        """The time of the thread that computes."""
        self.ends_s = [0.0] * NUM_IN_FLIGHT
        """The ends of averages."""
        self._link_free_s = 0.0
        self._traffic = traffic
        self._costs = costs
        self._cluster = cluster

    def run_pass(self, units: Sequence[UnitTraffic], compute_s: float, *, is_backward: bool) -> None:
        """Compute units one after the other, each when it is gathered; average gradients."""
        num_values = max(1, sum(unit.gather.num_values for unit in units))
        gathered_s: dict[int, float] = {}
        for number, unit in enumerate(units):
            num_asked = 2 if self._traffic.gathers_ahead else 1
            for asked in range(number, min(number + num_asked, len(units))):
                if asked not in gathered_s and units[asked].num_gathers > is_backward:
                    share = 1.0 if self._traffic.gathers_ahead else _RING_GATHER
                    gathered_s[asked] = self._begin(units[asked].gather, self._costs.gather, share)
                self.now_s = max(self.now_s, gathered_s.get(number, 0.0))
            self.now_s += compute_s * unit.gather.num_values / num_values
            if is_backward:
                self._average(unit)

    def _begin(self, bucket: BucketTraffic, costs: Costs, share: float = 1.0) -> float:
        """Return when a gather or a reduction ends that begins now; it shares the link with averages.

        It uses a ``share`` of the link's rate.
        """
        if not bucket.num_messages:
            return self.now_s
        times, uses_link = bucket_times(bucket, costs, self._cluster), bucket.node_bytes > 0
        begin_s = max(self.now_s, self._link_free_s) if uses_link else self.now_s
        end_s = begin_s + times.total_s + times.moving_s * (1 / share - 1)
        if uses_link:
            self._link_free_s = end_s
        # What is computed beside it shares the cores. Whoever waits for it does not wait longer.
        self.now_s += self._cluster.contention * (times.cpu_s + times.copy_s)
        return end_s

    def _average(self, unit: UnitTraffic) -> None:
        """Begin to average a unit's gradients, after torch has reduced them within a replica."""
        if unit.within is not None:
            self.now_s = self._begin(unit.within, self._costs.torch)
        if unit.average is None:
            return
        traffic, cluster = self._traffic, self._cluster
        times = bucket_times(unit.average, self._costs.average, cluster, traffic.work, traffic.num_meeting)
        if traffic.num_left:
            self.now_s = max(self.now_s, self.ends_s[-traffic.num_left])
        begin_s = max(self.now_s, self.ends_s[-NUM_IN_FLIGHT])
        self._link_free_s = max(self._link_free_s, begin_s + times.cpu_s) + times.moving_s
        self.ends_s.append(max(begin_s + times.total_s, self._link_free_s))
        self.now_s += cluster.contention * (times.cpu_s + times.copy_s)
        if traffic.num_left == 0:
            self.now_s = max(self.now_s, self.ends_s[-1])
