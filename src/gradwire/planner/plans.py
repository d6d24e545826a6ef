"""Predictions for recipes: their bytes from themselves, their costs from a calibration."""

from __future__ import annotations

import gradwire
from gradwire.headroom.records import ALLREDUCE, NOOP
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import Cluster, Prediction, Wire, even_buckets, predict_step

DEFAULT_BUCKET_MB = 25.0


def wire_of(recipe: str, num_parameters: int, num_workers: int, bucket_mb: float | None = None) -> Wire:
    """What a worker sends for a model of fp32 parameters; ``allreduce`` is plain DDP.

    >>> wire_of("bf16", 10_000_000, num_workers=2).bucket_bytes
    (13107200, 6892800)
    """
    buckets = even_buckets(num_parameters, int((bucket_mb or DEFAULT_BUCKET_MB) * 2**20 / 4))
    if recipe == ALLREDUCE:
        part = 2 * (num_workers - 1) / num_workers
        return Wire(buckets, tuple(int(4 * part * values) for values in buckets), is_ring=True)
    chosen = gradwire.recipe(recipe)
    num_bytes = (chosen.wire_bytes(values, world_size=num_workers) for values in buckets)
    return Wire(buckets, tuple(num_bytes))


def predict(
    recipe: str,
    num_parameters: int,
    compute_s: float,
    cluster: Cluster,
    calibration: Calibration,
    bucket_mb: float | None = None,
) -> Prediction:
    """A step with ``recipe``. Raises ValueError if the calibration does not know it."""
    if recipe == NOOP:
        return Prediction(compute_s, compute_s, 0, 0)
    if recipe not in calibration.costs:
        raise ValueError(f"the calibration has no {recipe!r}; it has {', '.join(calibration.costs)}")
    wire = wire_of(recipe, num_parameters, cluster.num_workers, bucket_mb)
    return predict_step(compute_s, wire, calibration.costs[recipe], cluster)
