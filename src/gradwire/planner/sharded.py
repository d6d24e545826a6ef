"""Predictions for models that ``fully_shard`` shards: FSDP2 and HSDP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

import gradwire
from gradwire.buckets import BucketLayout, shard_shape, trainable_parameters
from gradwire.headroom import ALLREDUCE, Sharding
from gradwire.peers import looks_ahead
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import RING_TRIPS, BucketTraffic, Cluster, Prediction, StepTraffic
from gradwire.planner.predictions import Model, layout_traffic, ring_traffic
from gradwire.planner.shapes import Shape, layers_of
from gradwire.planner.sharded_cost import ShardedCosts, ShardedTraffic, UnitTraffic, predict_sharded_step
from gradwire.recipes import placed, require_fixed, route_module_tables, scattered
from gradwire.sharded import row_bytes, shard_layout, unit_parameters, weights_codec


@dataclass(frozen=True)
class ShardedPlan:
    """The sharding of a model: the kind and the number of shards, and the way its parameters are gathered."""

    sharding: Sharding
    weights: str | None = None
    """The encoding of gathered parameters, as for `attach`; None if torch gathers them."""
    reshards: bool = True
    """True if blocks are freed after the forward pass, and gathered again."""


@dataclass(frozen=True)
class _Unit:
    """The parameters of one ``fully_shard`` call, by name."""

    shapes: dict[str, Shape]
    """All that are gathered."""
    trained: dict[str, Shape]
    """Those whose gradients are averaged."""
    num_gathers: int

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


def predict_sharded(
    recipe: str,
    model: Model,
    compute_s: float,
    cluster: Cluster,
    calibration: Calibration,
    plan: ShardedPlan,
) -> Prediction:
    """Predict a step with ``recipe`` of a model that is sharded; ``allreduce`` is torch's own sharding.

    Raises ValueError if the calibration does not have the recipe or the weights, if the recipe does not fit,
    or if shards do not divide the cluster's workers.
    """
    costs = ShardedCosts(
        calibration.costs_of(recipe),
        gather=calibration.costs_of(plan.weights or ALLREDUCE),
        torch=calibration.costs_of(ALLREDUCE),
    )
    traffic = sharded_traffic(recipe, model, cluster, plan)
    return predict_sharded_step(compute_s, traffic, costs, cluster)


def sharded_traffic(recipe: str, model: Model, cluster: Cluster, plan: ShardedPlan) -> ShardedTraffic:
    """Return the traffic of a step.

    >>> plan = ShardedPlan(Sharding("fsdp", 2))
    >>> (unit,) = sharded_traffic("int8", [(1000, 1000)], Cluster(num_nodes=2), plan).units
    >>> round(unit.gather.node_bytes), round(unit.average.node_bytes)
    (2000000, 503908)
    """
    shards, local = plan.sharding.num_shards, cluster.workers_per_node
    num_replicas = plan.sharding.num_replicas(cluster.num_workers)
    if shards % local and local % shards:
        raise ValueError(f"{shards} shards do not fit nodes of {local} workers: one must divide the other")
    units = _units(model, plan.reshards)
    is_fsdp = plan.sharding.kind == "fsdp"
    # The ranks of a replica, and those that average: with replicas, the ranks that hold the same shard.
    replica = replace(cluster, num_nodes=max(1, shards // local), workers_per_node=min(shards, local))
    per_node = max(1, local // shards)
    peers = replace(cluster, num_nodes=num_replicas // per_node, workers_per_node=per_node)
    trained = [unit.trained for unit in units if unit.trained]
    layouts = [shard_layout(0, shapes, shards, shards if is_fsdp else 1) for shapes in trained]
    averages = _averages(recipe, model, layouts, cluster if is_fsdp else peers, is_fsdp=is_fsdp)
    if not is_fsdp:  # each shard of a node has such an average
        factor = local // per_node
        buckets = (replace(each, node_bytes=factor * each.node_bytes) for each in averages.buckets)
        averages = replace(averages, buckets=tuple(buckets))
    left = iter(averages.buckets)
    torch_reduces = not is_fsdp and shards > 1

    def traffic_of(unit: _Unit) -> UnitTraffic:
        gather, average, within = _gather(unit, plan, replica, by_nodes=is_fsdp), None, None
        if unit.trained:
            average = next(left, None)
        if unit.trained and torch_reduces:
            within = ring_traffic(shard_layout(0, unit.trained, shards, shards), replica)
        return UnitTraffic(gather, unit.num_gathers, average, within)

    return ShardedTraffic(
        tuple(map(traffic_of, units)),
        averages.work,
        averages.num_meeting,
        # Whole gradients would take memory while they wait, shards take little.
        num_left=0 if recipe == ALLREDUCE else 2 if is_fsdp else None,
        gathers_ahead=plan.weights is not None,
    )


def _averages(
    recipe: str, model: Model, layouts: Sequence[BucketLayout], cluster: Cluster, *, is_fsdp: bool
) -> StepTraffic:
    """Return the traffic of averages over ``cluster``: of whole gradients, or of a shard between replicas."""
    if cluster.num_workers == 1:
        return StepTraffic(())
    if recipe == ALLREDUCE:
        # Over Gloo torch's reduce-scatter is a whole all-reduce too.
        return StepTraffic(tuple(ring_traffic(layout, cluster) for layout in layouts))
    chosen = gradwire.recipe(recipe)
    require_fixed(chosen, "a plan")
    if isinstance(model, nn.Module):
        chosen = route_module_tables(chosen, model, trainable_parameters(model))
    node_size = cluster.workers_per_node if cluster.num_nodes > 1 else 1
    chosen = scattered(chosen) if is_fsdp else placed(chosen, node_size, cluster.num_workers)
    return layout_traffic(chosen, layouts, cluster)


def _units(model: Model, reshards: bool) -> list[_Unit]:
    """Return the units in the order of the forward pass; the root's parameters, gathered once, come first."""
    num_gathers = 2 if reshards else 1
    if not isinstance(model, nn.Module):
        layers = (dict(zip(map(str, range(len(own))), own, strict=True)) for own in layers_of(model))
        return [_Unit(layer, layer, num_gathers) for layer in layers]
    return [
        _Unit(
            {name: tuple(p.shape) for name, p in unit.items()},
            {name: tuple(p.shape) for name, p in unit.items() if p.requires_grad},
            num_gathers if number else 1,  # the root's parameters stay whole after the forward pass
        )
        for number, unit in enumerate(unit_parameters(model))
        if unit
    ]


def _gather(unit: _Unit, plan: ShardedPlan, replica: Cluster, *, by_nodes: bool) -> BucketTraffic:
    """Return the traffic of an all-gather over the ranks of a replica: torch's in a ring, or gradwire's.

    gradwire's has a round to compare what ranks do. Then ``by_nodes`` it has one between nodes and one for
    each node within them, otherwise one in all.
    """
    num_nodes, num_local, num_peers = replica.num_nodes, replica.workers_per_node, replica.num_workers - 1
    shapes = [torch.Size(shard_shape(whole, 0, replica.num_workers)) for whole in unit.shapes.values()]
    codec = weights_codec(gradwire.recipe(plan.weights or "fp32"))
    row = row_bytes(shapes, torch.float32, codec)
    if plan.weights is None:
        leaving, num_rounds, num_messages = num_peers * row if num_nodes > 1 else 0, num_peers, num_peers
    else:
        num_rounds, num_messages = 2 if num_peers else 0, 2 * num_peers
        leaving = num_local * (num_nodes - 1) * (1 if by_nodes else num_local) * row
        if by_nodes and num_nodes > 1 and num_local > 1:
            num_rounds += num_nodes
    # Receives are posted with each round, as in a ring, unless gradwire posts them ahead of time.
    is_ahead = plan.weights is not None and looks_ahead(2 * replica.latency_s, row)
    trips = num_rounds if is_ahead else RING_TRIPS * num_rounds
    return BucketTraffic(unit.numel, num_peers * row, leaving, num_rounds, num_messages, trips)
