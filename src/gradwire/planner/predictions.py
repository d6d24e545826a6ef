"""Predictions for recipes: bytes and messages from the recipe itself, costs from a calibration."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

import gradwire
from gradwire.buckets import BucketLayout, Slot
from gradwire.exchanges import Exchange, LowRank
from gradwire.headroom import ALLREDUCE, NOOP
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import BucketTraffic, Cluster, Prediction, StepTraffic, predict_step
from gradwire.planner.shapes import Shape, ddp_buckets


def predict(
    recipe: str,
    shapes: Sequence[Shape],
    compute_s: float,
    cluster: Cluster,
    calibration: Calibration,
    bucket_mb: float | None = None,
) -> Prediction:
    """Predict a step with ``recipe`` of a model with fp32 parameters of these shapes.

    Raises ValueError if the calibration does not have the recipe.
    """
    if recipe == NOOP:
        return Prediction(compute_s, compute_s, 0, 0)
    if recipe not in calibration.costs:
        raise ValueError(
            f"the calibration has no {recipe!r}, only {', '.join(calibration.costs)}: calibrate again with "
            "all recipes that you plan"
        )
    traffic = step_traffic(recipe, shapes, cluster, bucket_mb)
    return predict_step(compute_s, traffic, calibration.costs[recipe], cluster)


def step_traffic(
    recipe: str,
    shapes: Sequence[Shape],
    cluster: Cluster,
    bucket_mb: float | None = None,
    bytes_per_value: float = 4,
) -> StepTraffic:
    """Return the traffic of a step with fp32 parameters of these shapes; ``allreduce`` is plain DDP.

    DDP cuts buckets by their bytes, with ``bytes_per_value`` for each value.

    >>> traffic = step_traffic("bf16", [(1000, 1000)], Cluster(num_nodes=2))
    >>> [round(bucket.node_bytes) for bucket in traffic.buckets]
    [2000000]
    """
    num_workers, num_local = cluster.num_workers, cluster.workers_per_node
    bucket_shapes = [tuple(bucket) for bucket in ddp_buckets(shapes, bucket_mb, bytes_per_value)]
    if num_workers == 1:
        return StepTraffic(())
    if recipe == ALLREDUCE:
        return StepTraffic(tuple(_ring_traffic(bucket, cluster) for bucket in bucket_shapes))
    # As `attach` does, average within a node first if nodes have several workers.
    placed = gradwire.recipe(recipe).with_node_size(num_local if cluster.num_nodes > 1 else 1)
    exchange, node_size = placed.exchange, placed.local_size or 1
    # Most buckets of a large model are alike, and counting takes long for thousands of workers.
    traffic_of = functools.cache(
        lambda bucket: _exchange_traffic(exchange, _layout(bucket), cluster, node_size)
    )
    buckets, num_senders = tuple(map(traffic_of, bucket_shapes)), num_workers // node_size
    # With low rank, every worker does all of the work.
    work = 1.0 if isinstance(exchange, LowRank) else _two_shot_work(num_senders) / node_size
    return StepTraffic(buckets, work, messages_meet=num_senders > 2)


def can_be_planned(recipe: gradwire.Recipe) -> bool:
    """Return True if a recipe does the same in every step and to every parameter."""
    return not recipe.parts


def shapes_of(model: torch.nn.Module) -> list[Shape]:
    """Return the shapes of a model's trained parameters."""
    return [tuple(p.shape) for p in model.parameters() if p.requires_grad]


def _ring_traffic(shapes: Sequence[Shape], cluster: Cluster) -> BucketTraffic:
    """Return the traffic of a ring, in which one worker of each node sends to the next node."""
    n, num_values = cluster.num_workers, sum(map(math.prod, shapes))
    num_bytes = 4 * num_values * 2 * (n - 1) / n
    node_bytes = num_bytes if cluster.num_nodes > 1 else 0.0
    return BucketTraffic(num_values, num_bytes, node_bytes, 2 * (n - 1), 2 * (n - 1))


def _exchange_traffic(
    exchange: Exchange, layout: BucketLayout, cluster: Cluster, node_size: int
) -> BucketTraffic:
    """Return the traffic of the busiest worker; the exchange averages within ``node_size`` workers first."""
    n, num_local = cluster.num_workers, cluster.workers_per_node
    # Part of the bytes between the exchange's nodes may stay within one of the cluster's.
    leaving = num_local * (n - num_local) / max(1, n - node_size)
    figures, first = [], exchange.starts[-1]
    for step in (first, first + 1):  # the mean of both, because low rank alternates between two sides
        within, across = max(exchange.link_bytes(layout, n, step), key=sum)
        rounds = exchange.link_rounds(layout, n, step)
        num_messages = rounds.within * (node_size - 1) + rounds.across * (n // node_size - 1)
        figures.append((within + across, across * leaving, sum(rounds), num_messages))
    return BucketTraffic(layout.numel, *(sum(both) / 2 for both in zip(*figures, strict=True)))


def _two_shot_work(n: int) -> float:
    """Return the work of each of n workers, relative to that of each of two."""
    # A worker encodes (n - 1)/n of the values for others, sums and decodes as many, and encodes 1/n again.
    return (3 * n - 2) / (2 * n)


def _layout(shapes: Sequence[Shape]) -> BucketLayout:
    slots = [
        Slot(str(number), 0, torch.Size(shape), torch.empty(shape, device="meta").stride())
        for number, shape in enumerate(shapes)
    ]
    return BucketLayout.packed(0, torch.float32, slots)
