"""Predictions for recipes: bytes and messages from the recipe itself, costs from a calibration."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import astuple

import torch
from torch import nn

import gradwire
from gradwire.buckets import BucketLayout, Slot, row_by_row, trainable_parameters
from gradwire.codecs import Codec
from gradwire.ddp import DDPBuckets
from gradwire.exchanges import Exchange, Hierarchical, Links, LowRank, Route, Scattered, TwoShot, num_rounds
from gradwire.headroom import ALLREDUCE, NOOP
from gradwire.peers import looks_ahead
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import (
    RING_TRIPS,
    BucketTraffic,
    Cluster,
    Prediction,
    StepTraffic,
    predict_step,
)
from gradwire.planner.shapes import Shape, ddp_buckets
from gradwire.recipes import placed, require_fixed, resolve_for_module

# The work of two ranks that take one round, in passes over the values: encoding them, and decoding two rows.
# It is 1.2 to 1.4 times the work of two phases (benchmarks/kernels.py).
_ONE_ROUND = 2.5

Model = Sequence[Shape] | nn.Module
"""A model to plan: a module, or the shapes of its fp32 parameters."""


def predict(
    recipe: str,
    model: Model,
    compute_s: float,
    cluster: Cluster,
    calibration: Calibration,
    bucket_mb: float | None = None,
) -> Prediction:
    """Predict a step with ``recipe`` of a model.

    Raises ValueError if the calibration does not have the recipe, or if the recipe does not fit the model.
    """
    if recipe == NOOP:
        return Prediction(compute_s, compute_s, 0, 0)
    costs = calibration.costs_of(recipe)
    traffic = step_traffic(recipe, model, cluster, bucket_mb)
    return predict_step(compute_s, traffic, costs, cluster)


def step_traffic(
    recipe: str,
    model: Model,
    cluster: Cluster,
    bucket_mb: float | None = None,
    bytes_per_value: float = 4,
) -> StepTraffic:
    """Return the traffic of a step; ``allreduce`` is plain DDP.

    A module's embeddings and output layers go by the recipe that `attach` would send them by. Shapes are of
    fp32 parameters, and none of them is an embedding; DDP cuts their buckets by their bytes, with
    ``bytes_per_value`` for each value.

    >>> traffic = step_traffic("bf16", [(1000, 1000)], Cluster(num_nodes=2))
    >>> [round(bucket.node_bytes) for bucket in traffic.buckets]
    [2000000]
    """
    num_workers, num_local = cluster.num_workers, cluster.workers_per_node
    if num_workers == 1:
        return StepTraffic(())
    if isinstance(model, nn.Module):
        layouts = DDPBuckets(model, bucket_mb).rebuilt()
    else:
        layouts = tuple(_layout(bucket) for bucket in ddp_buckets(model, bucket_mb, bytes_per_value))
    if recipe == ALLREDUCE:
        return StepTraffic(tuple(ring_traffic(layout, cluster) for layout in layouts))
    chosen = gradwire.recipe(recipe)
    require_fixed(chosen, "a plan")
    if isinstance(model, nn.Module):
        chosen = resolve_for_module(chosen, model, trainable_parameters(model), num_workers)
    # As `attach` does, average within a node first if nodes have several workers.
    chosen = placed(chosen, num_local if cluster.num_nodes > 1 else 1, num_workers)
    return layout_traffic(chosen, layouts, cluster)


def layout_traffic(chosen: gradwire.Recipe, layouts: Sequence[BucketLayout], cluster: Cluster) -> StepTraffic:
    """Return the traffic of buckets that a recipe averages."""
    num_workers = cluster.num_workers
    # Most buckets of a large model are alike, and counting takes long for thousands of workers.
    traffic_of = functools.cache(
        lambda each, *key: _exchange_traffic(each.exchange, _unnamed(*key), cluster, each.local_size or 1)
    )
    buckets, work, num_values = [], 0.0, 0
    for layout in layouts:
        parts = list(_split(chosen, layout))
        found = [traffic_of(each, *_key(part)) for each, part in parts]
        buckets.append(BucketTraffic(*(sum(figures) for figures in zip(*map(astuple, found), strict=True))))
        work += sum(part.numel * _work(each, num_workers) for each, part in parts)
        num_values += layout.numel
    num_meeting = max(num_workers // (each.local_size or 1) for each in chosen.leaves())
    return StepTraffic(tuple(buckets), work / num_values, num_meeting)


def can_be_planned(recipe: gradwire.Recipe) -> bool:
    """Return True if a recipe is neither a schedule nor a route, nor one that changes while it runs."""
    return not recipe.parts and recipe.tuning is None


def shapes_of(model: nn.Module) -> list[Shape]:
    """Return the shapes of a model's trained parameters."""
    return [tuple(p.shape) for p in model.parameters() if p.requires_grad]


def _split(recipe: gradwire.Recipe, layout: BucketLayout) -> Iterator[tuple[gradwire.Recipe, BucketLayout]]:
    """Yield the parts of a bucket, each with its recipe."""
    if not isinstance(recipe.exchange, Route):
        yield recipe, layout
        return
    for _, part, _ in recipe.exchange.split(layout):
        yield recipe.parts[part.index % len(recipe.parts)][1], part


def ring_traffic(layout: BucketLayout, cluster: Cluster) -> BucketTraffic:
    """Return the traffic of a ring, in which one worker of each node sends to the next node."""
    n = cluster.num_workers
    num_bytes = layout.dtype.itemsize * layout.numel * 2 * (n - 1) / n
    node_bytes = num_bytes if cluster.num_nodes > 1 else 0.0
    rounds = 2 * (n - 1)
    return BucketTraffic(layout.numel, num_bytes, node_bytes, rounds, rounds, RING_TRIPS * rounds)


def _exchange_traffic(
    exchange: Exchange, layout: BucketLayout, cluster: Cluster, node_size: int
) -> BucketTraffic:
    """Return the traffic of the busiest worker; the exchange averages within ``node_size`` workers first."""
    n, num_local = cluster.num_workers, cluster.workers_per_node
    # Part of the bytes between the exchange's nodes may stay within one of the cluster's, and part of those
    # within a row of a grid may leave it.
    leaving = num_local * (n - max(num_local, node_size)) / max(1, n - node_size)
    leaving_row = num_local * max(0, node_size - num_local) / max(1, node_size - 1)
    figures, first = [], exchange.starts[-1]
    for step in (first, first + 1):  # the mean of both, because low rank alternates between two sides
        within, across = max(exchange.link_bytes(layout, n, step), key=sum)
        rounds = exchange.link_rounds(layout, n, step)
        num_messages = rounds.within * (node_size - 1) + rounds.across * (n // node_size - 1)
        node_bytes = across * leaving + within * leaving_row
        trips = sum(rounds)
        if not looks_ahead(2 * cluster.latency_s, (within + across) / max(1, num_messages)):
            trips += _num_sums(exchange, layout, rounds)
        figures.append((within + across, node_bytes, sum(rounds), num_messages, trips))
    return BucketTraffic(layout.numel, *(sum(both) / 2 for both in zip(*figures, strict=True)))


def _num_sums(exchange: Exchange, layout: BucketLayout, rounds: Links) -> int:
    """Return the number of sums that follow one another.

    Gloo sends a message when it knows of its receive, and that news takes as long as the message. Receives of
    all rounds of a sum are posted at once, so each sum waits for that news once; not on far links, where
    receives are posted ahead of time.
    """
    if isinstance(exchange, Hierarchical):
        return 2 if rounds.across else 1
    if isinstance(exchange, LowRank) and exchange.plan(layout).batches:
        return exchange.num_rounds
    return 1 if sum(rounds) else 0


def _work(recipe: gradwire.Recipe, num_workers: int) -> float:
    """Return the work of each worker, relative to that of each of two."""
    exchange = recipe.exchange
    if isinstance(exchange, Scattered):  # sums are neither encoded nor decoded again
        return 2 * (num_workers - 1) / num_workers / _passes(exchange.codec, 2)
    if not isinstance(exchange, (TwoShot, Hierarchical)):
        return 1.0  # every worker does all of it
    node_size = recipe.local_size or 1
    num_nodes, of_two = num_workers // node_size, _passes(exchange.codec, 2)
    if isinstance(exchange, Hierarchical) and exchange.encodes_within:
        if num_nodes == 1:
            return _passes(exchange.codec, node_size) / of_two
        return (_two_phases(num_nodes) + 3 * (node_size - 1)) / node_size / of_two
    return _passes(exchange.codec, num_nodes) / node_size / of_two


def _passes(codec: Codec, num_ranks: int) -> float:
    """Return how often a rank encodes, decodes or sums each value of an average."""
    if num_rounds([codec.resolve(torch.float32)], num_ranks) == 1:
        return _ONE_ROUND
    return _two_phases(num_ranks)


def _two_phases(num_ranks: int) -> float:
    # A rank encodes (n - 1)/n of the values for others, sums and decodes as many, and encodes 1/n again.
    return (3 * num_ranks - 2) / num_ranks


def _layout(shapes: Sequence[Shape]) -> BucketLayout:
    return _unnamed(torch.float32, tuple(map(torch.Size, shapes)), tuple(map(row_by_row, shapes)))


def _key(layout: BucketLayout) -> tuple[torch.dtype, tuple[torch.Size, ...], tuple[tuple[int, ...], ...]]:
    """Return what the traffic of a layout depends on, so that equal buckets are counted once."""
    return layout.dtype, tuple(s.shape for s in layout.slots), tuple(s.stride for s in layout.slots)


def _unnamed(
    dtype: torch.dtype, shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]]
) -> BucketLayout:
    """Return a layout of parameters that have numbers for names."""
    slots = [Slot(str(i), 0, *place) for i, place in enumerate(zip(shapes, strides, strict=True))]
    return BucketLayout.packed(0, dtype, slots)
