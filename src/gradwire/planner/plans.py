"""Predictions for recipes: their bytes and messages from themselves, their costs from a calibration."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

import gradwire
from gradwire.exchanges import Hierarchical, LowRank, Route, Schedule
from gradwire.headroom.records import ALLREDUCE, NOOP
from gradwire.layout import BucketLayout, Slot
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
    wire = wire_of(recipe, shapes, cluster, costs.rounds_per_bucket, bucket_mb)
    return predict_step(compute_s, wire, costs, cluster)


def wire_of(
    recipe: str,
    shapes: Sequence[Shape],
    cluster: Cluster,
    rounds_per_bucket: float = 2,
    bucket_mb: float | None = None,
) -> Wire:
    """What workers send for fp32 parameters of these shapes; ``allreduce`` is plain DDP.

    >>> wire = wire_of("bf16", [(1000, 1000)], Cluster(num_nodes=2))
    >>> [round(bucket.node_bytes) for bucket in wire.buckets]
    [2000000]
    """
    n, num_local = cluster.num_workers, cluster.workers_per_node
    cut = [tuple(bucket) for bucket in ddp_buckets(shapes, bucket_mb)]
    layouts = [_layout(bucket) for bucket in cut]
    if n == 1:
        return Wire(())
    if recipe == ALLREDUCE:
        return Wire(tuple(_ring_bucket(layout.numel, cluster) for layout in layouts))
    # Cached below: most buckets of a large model are alike, and thousands of workers take long to count.
    # Placed as `attach` does, where nodes have several workers.
    exchange = gradwire.recipe(recipe).placed(num_local if cluster.num_nodes > 1 else 1).exchange
    if isinstance(exchange, Hierarchical):
        link_bytes = functools.cache(lambda numel: exchange.link_bytes(numel, torch.float32, 0, n))
        within = (link_bytes(layout.numel) for layout in layouts)
        num_messages = 2 * (num_local - 1) + 2 * (cluster.num_nodes - 1)
        buckets = tuple(
            Bucket(layout.numel, sum(sent), sent[1] * num_local, 4, num_messages)
            for layout, sent in zip(layouts, within, strict=True)
        )
        work = _two_shot_work(cluster.num_nodes) / num_local
        return Wire(buckets, work, messages_meet=cluster.num_nodes > 2)
    leaving = num_local * (n - num_local) / (n - 1)
    if isinstance(exchange, LowRank):
        low_rank = functools.cache(lambda bucket: _low_rank_figures(exchange, _layout(bucket), n))
        figures = [low_rank(bucket) for bucket in cut]
        work = 1.0  # every worker does all of it
    else:
        wire_bytes = functools.cache(lambda numel: exchange.wire_bytes(numel, torch.float32, 0, n))
        figures = [(wire_bytes(layout.numel), rounds_per_bucket) for layout in layouts]
        work = _two_shot_work(n)
    buckets = tuple(
        Bucket(layout.numel, num_bytes, num_bytes * leaving, num_rounds, num_rounds * (n - 1))
        for layout, (num_bytes, num_rounds) in zip(layouts, figures, strict=True)
    )
    return Wire(buckets, work, messages_meet=n > 2)


def can_be_planned(recipe: gradwire.Recipe) -> bool:
    """Whether a recipe does the same in every step, to every parameter."""
    return not isinstance(recipe.exchange, Route | Schedule)


def shapes_of(model: torch.nn.Module) -> list[Shape]:
    """The shapes of what a model trains."""
    return [tuple(p.shape) for p in model.parameters() if p.requires_grad]


def _ring_bucket(num_values: int, cluster: Cluster) -> Bucket:
    """A ring has one sender for each receiver; of a node, one worker sends to the next node."""
    n = cluster.num_workers
    num_bytes = 4 * num_values * 2 * (n - 1) / n
    leaving = num_bytes if cluster.num_nodes > 1 else 0.0
    return Bucket(num_values, num_bytes, leaving, 2 * (n - 1), 2 * (n - 1))


def _two_shot_work(n: int) -> float:
    """What each of n workers does, over what each of two does."""
    # Of the values (n - 1)/n are encoded for others, as many added up and decoded, and 1/n encoded again.
    return (3 * n - 2) / (2 * n)


def _low_rank_figures(exchange: LowRank, layout: BucketLayout, n: int) -> tuple[float, float]:
    """Bytes and rounds of a step; the mean of two, where the sides take turns."""
    steps = (exchange.start, exchange.start + 1)
    # The last rank has the longest chunk, others may have none of so few values.
    num_bytes = sum(exchange.bucket_bytes(layout, n - 1, n, step) for step in steps) / 2
    num_rounds = sum(exchange.bucket_rounds(layout, n, step) for step in steps) / 2
    return num_bytes, num_rounds


def _layout(shapes: Sequence[Shape]) -> BucketLayout:
    slots, offset = [], 0
    for number, shape in enumerate(shapes):
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        slots.append(Slot(str(number), offset, torch.Size(shape), strides))
        offset += math.prod(shape)
    return BucketLayout(0, torch.float32, tuple(slots))
