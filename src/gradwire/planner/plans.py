"""Predictions for recipes: their bytes and messages from themselves, their costs from a calibration."""

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
from gradwire.planner.cost import Bucket, Cluster, Prediction, Wire, predict_step
from gradwire.planner.shapes import Shape, ddp_buckets


def predict(
    recipe: str,
    shapes: Sequence[Shape],
    compute_s: float,
    cluster: Cluster,
    calibration: Calibration,
    bucket_mb: float | None = None,
) -> Prediction:
    """A step with ``recipe`` of a model with fp32 parameters of these shapes.

    Raises ValueError if the calibration does not know the recipe.
    """
    if recipe == NOOP:
        return Prediction(compute_s, compute_s, 0, 0)
    if recipe not in calibration.costs:
        has = ", ".join(calibration.costs)
        raise ValueError(
            f"the calibration has no {recipe!r}; it has {has}: measure one that has all you plan"
        )
    costs = calibration.costs[recipe]
    return predict_step(compute_s, wire_of(recipe, shapes, cluster, bucket_mb), costs, cluster)


def wire_of(
    recipe: str,
    shapes: Sequence[Shape],
    cluster: Cluster,
    bucket_mb: float | None = None,
    bytes_per_value: float = 4,
) -> Wire:
    """What workers send for fp32 parameters of these shapes; ``allreduce`` is plain DDP.

    Buckets are cut as if gradients had ``bytes_per_value``.

    >>> wire = wire_of("bf16", [(1000, 1000)], Cluster(num_nodes=2))
    >>> [round(bucket.node_bytes) for bucket in wire.buckets]
    [2000000]
    """
    n, num_local = cluster.num_workers, cluster.workers_per_node
    cut = [tuple(bucket) for bucket in ddp_buckets(shapes, bucket_mb, bytes_per_value)]
    if n == 1:
        return Wire(())
    if recipe == ALLREDUCE:
        return Wire(tuple(_ring_bucket(sum(map(math.prod, bucket)), cluster) for bucket in cut))
    # Placed as `attach` does, where nodes have several workers.
    placed = gradwire.recipe(recipe).with_node_size(num_local if cluster.num_nodes > 1 else 1)
    exchange, num_together = placed.exchange, placed.local_size or 1
    # Most buckets of a large model are alike, and thousands of workers take long to count.
    bucket_of = functools.cache(lambda bucket: _bucket(exchange, _layout(bucket), cluster, num_together))
    buckets, num_apart = tuple(map(bucket_of, cut)), n // num_together
    # Of low rank, every worker does all of it.
    work = 1.0 if isinstance(exchange, LowRank) else _two_shot_work(num_apart) / num_together
    return Wire(buckets, work, messages_meet=num_apart > 2)


def can_be_planned(recipe: gradwire.Recipe) -> bool:
    """Whether a recipe does the same in every step, to every parameter."""
    return not recipe.parts


def shapes_of(model: torch.nn.Module) -> list[Shape]:
    """The shapes of what a model trains."""
    return [tuple(p.shape) for p in model.parameters() if p.requires_grad]


def _ring_bucket(num_values: int, cluster: Cluster) -> Bucket:
    """A ring has one sender for each receiver; of a node, one worker sends to the next node."""
    n = cluster.num_workers
    num_bytes = 4 * num_values * 2 * (n - 1) / n
    leaving = num_bytes if cluster.num_nodes > 1 else 0.0
    return Bucket(num_values, num_bytes, leaving, 2 * (n - 1), 2 * (n - 1))


def _bucket(exchange: Exchange, layout: BucketLayout, cluster: Cluster, num_together: int) -> Bucket:
    """What the busiest worker sends; ``num_together`` are a node to the exchange."""
    n, num_local = cluster.num_workers, cluster.workers_per_node
    # Of what goes to nodes of the exchange's, some may stay in one of the cluster's.
    leaving = num_local * (n - num_local) / max(1, n - num_together)
    figures, first = [], exchange.starts[-1]
    for step in (first, first + 1):  # the mean of both, as sides of low rank take turns
        within, across = max(exchange.link_bytes(layout, n, step), key=sum)
        rounds = exchange.link_rounds(layout, n, step)
        num_messages = rounds.within * (num_together - 1) + rounds.across * (n // num_together - 1)
        figures.append((within + across, across * leaving, sum(rounds), num_messages))
    return Bucket(layout.numel, *(sum(both) / 2 for both in zip(*figures, strict=True)))


def _two_shot_work(n: int) -> float:
    """What each of n workers does, over what each of two does."""
    # Of the values (n - 1)/n are encoded for others, as many added up and decoded, and 1/n encoded again.
    return (3 * n - 2) / (2 * n)


def _layout(shapes: Sequence[Shape]) -> BucketLayout:
    slots = [
        Slot(str(number), 0, torch.Size(shape), torch.empty(shape, device="meta").stride())
        for number, shape in enumerate(shapes)
    ]
    return BucketLayout.packed(0, torch.float32, slots)
