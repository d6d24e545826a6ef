"""The cost model of a sharded step: `cost` with all-gathers of parameters. No torch.

Parameters of a block are gathered before its forward pass, and again before its backward pass if they were
freed in between. As torch does on CPU, computing waits for a gather. Gradients of a block are averaged after
its backward pass. Averages by a recipe run beside the passes of earlier blocks, torch's own do not. With
replicas, torch first reduces the gradients within a replica.
"""

from __future__ import annotations

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
    messages_meet: bool = False
    """Both as in `StepTraffic`."""
    waits: bool = False
    """True if computing waits for each average, as for torch's own."""


def predict_sharded_step(
    compute_s: float, traffic: ShardedTraffic, costs: Costs, torch_costs: Costs, cluster: Cluster
) -> Prediction:
    """Predict a step whose forward and backward alone take ``compute_s``.

    ``costs`` are those of the averages, and ``torch_costs`` those of torch's gathers and reductions.
    """
    total_values = max(1, sum(unit.gather.num_values for unit in traffic.units))
    now_s, link_free_s, ends_s = 0.0, 0.0, [0.0] * NUM_IN_FLIGHT

    def wait_for(bucket: BucketTraffic) -> None:
        """Let computing wait for a bucket of torch's; it shares the link with averages."""
        nonlocal now_s, link_free_s
        if not bucket.num_messages:
            return
        times = bucket_times(bucket, torch_costs, cluster)
        begin_s = max(now_s, link_free_s) if bucket.node_bytes else now_s
        now_s = begin_s + times.total_s
        link_free_s = max(link_free_s, now_s) if bucket.node_bytes else link_free_s

    for unit in traffic.units:
        wait_for(unit.gather)
        now_s += compute_s * (1 - BACKWARD_SHARE) * unit.gather.num_values / total_values
    for unit in reversed(traffic.units):
        if unit.num_gathers > 1:
            wait_for(unit.gather)
        now_s += compute_s * BACKWARD_SHARE * unit.gather.num_values / total_values
        if unit.within is not None:
            wait_for(unit.within)
        if unit.average is None:
            continue
        times = bucket_times(unit.average, costs, cluster, traffic.work, traffic.messages_meet)
        begin_s = max(now_s, ends_s[-NUM_IN_FLIGHT])
        link_free_s = max(link_free_s, begin_s + times.cpu_s) + times.moving_s
        ends_s.append(max(begin_s + times.total_s, link_free_s))
        now_s += cluster.contention * (times.cpu_s + times.copy_s)
        if traffic.waits:
            now_s = ends_s[-1]
    parts = [part for unit in traffic.units for part in (unit.average, unit.within) if part is not None]
    gathers = [(unit.num_gathers, unit.gather) for unit in traffic.units]
    gathered = sum(times * gather.node_bytes for times, gather in gathers)
    return Prediction(
        max(now_s, *ends_s),
        compute_s,
        round(gathered + sum(part.node_bytes for part in parts)),
        round(sum(n * gather.num_messages for n, gather in gathers) + sum(p.num_messages for p in parts)),
        round(gathered),
    )
