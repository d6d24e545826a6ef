"""Predictions for an outer loop, which averages parameters every few steps: `gradwire.LocalSGD`."""

from __future__ import annotations

from torch import nn

import gradwire
from gradwire.buckets import trainable_parameters
from gradwire.headroom import OuterPrediction, predict_outer_loop
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import Cluster, StepTraffic, predict_step
from gradwire.planner.predictions import Model, step_traffic
from gradwire.training import parse_averaging


def predict_outer(
    recipe: str,
    model: Model,
    compute_s: float,
    cluster: Cluster,
    calibration: Calibration,
    *,
    period: int | None,
    fragments: int = 1,
    delay: int | None = None,
) -> OuterPrediction:
    """Predict an outer loop of ``fragments``, each averaged every ``period`` steps.

    ``period=None`` and ``delay=None`` are as for `predict_outer_loop`. Raises ValueError if the calibration
    does not have the recipe, if local SGD refuses it, if the model does not have as many layers as fragments,
    or if the period is too short for them.

    >>> from gradwire.planner import Costs
    >>> free = Calibration("a machine", "2.13", {"bf16": Costs(0, 0, 0, 0, 0)}, num_cores=2)
    >>> slow = Cluster(num_nodes=2, bits_per_s=8e6)
    >>> found = predict_outer("bf16", [(1000, 500)] * 4, 0.1, slow, free, period=100, fragments=4)
    >>> found.bytes_per_step, found.turn_bytes, found.delay
    (40000, 1000000, 11)
    """
    costs = calibration.costs_of(recipe)
    parse_averaging(recipe, gradwire.DiLoCo(), weigh=False)  # raises for what LocalSGD refuses
    traffic = step_traffic(recipe, model, cluster)
    whole = predict_step(0.0, traffic, costs, cluster)
    # Averaging takes CPU time from the steps beside it where a worker has less than two cores.
    work_s = cluster.contention * max(0.0, whole.step_s - _link_s(traffic, cluster))
    return predict_outer_loop(
        whole.step_s,
        whole.bytes_per_step,
        compute_s,
        period=period,
        fragments=fragments,
        delay=delay,
        peak=_peak(model, fragments),
        work_s=work_s,
    )


def _peak(model: Model, fragments: int) -> float:
    """Return the values of the largest fragment over those of a mean one; 1 if layers are not known."""
    if not isinstance(model, nn.Module):
        return 1.0
    numels = {name: p.numel() for name, p in trainable_parameters(model).items()}
    divided = gradwire.DiLoCo(fragments=fragments).divide(numels)
    return max(sum(numels[name] for name in own) for own in divided) * fragments / sum(numels.values())


def _link_s(traffic: StepTraffic, cluster: Cluster) -> float:
    return sum(cluster.link_s(bucket.node_bytes, traffic.num_meeting) for bucket in traffic.buckets)
