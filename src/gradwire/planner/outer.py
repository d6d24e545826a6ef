"""Predictions for an outer loop, which averages parameters every few steps: `gradwire.LocalSGD`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

import gradwire
from gradwire.buckets import trainable_parameters
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import Cluster, StepTraffic, predict_step
from gradwire.planner.predictions import Model, step_traffic

# Part of the time that a link may be busy, for others use it too, and its rate changes.
_MOST_BUSY = 0.8


@dataclass(frozen=True)
class OuterPrediction:
    """One predicted outer loop."""

    step_s: float
    """A step in the mean, with its share of the waiting."""
    compute_s: float
    bytes_per_step: int
    """Bytes that a node sends through its link, in the mean over a period."""
    turn_bytes: int
    """Bytes that a node sends for the largest fragment."""
    peak: float
    """The bytes of the largest fragment over those of a mean one."""
    turn_s: float
    """Time to average the largest fragment."""
    delay: int
    """Steps between the start and the end of an averaging."""
    least_period: int
    """The shortest period that leaves a fifth of the time free."""

    @property
    def efficiency(self) -> float:
        """The scaling efficiency: the share of compute in a step, from 0 to 1."""
        return self.compute_s / self.step_s


def predict_outer(
    recipe: str,
    model: Model,
    compute_s: float,
    cluster: Cluster,
    calibration: Calibration,
    *,
    period: int,
    fragments: int = 1,
    delay: int | None = None,
) -> OuterPrediction:
    """Predict an outer loop of ``fragments``, each averaged every ``period`` steps.

    With ``delay=None``, the delay is the smallest that hides an averaging; but fragments take turns, so it
    is at most a turn. Raises ValueError if the calibration does not have the recipe, or the model does not
    have as many layers as fragments.

    >>> from gradwire.planner import Costs
    >>> free = Calibration("a machine", "2.13", {"bf16": Costs(0, 0, 0, 0, 0)}, num_cores=2)
    >>> slow = Cluster(num_nodes=2, bits_per_s=8e6)
    >>> found = predict_outer("bf16", [(1000, 500)] * 4, 0.1, slow, free, period=100, fragments=4)
    >>> found.bytes_per_step, found.turn_bytes, found.delay
    (40000, 1000000, 11)
    """
    if recipe not in calibration.costs:
        raise ValueError(f"the calibration has no {recipe!r}: calibrate again with all recipes that you plan")
    if period < fragments:
        raise ValueError(f"a period of {period} steps is too short for {fragments} fragments")
    traffic = step_traffic(recipe, model, cluster)
    whole = predict_step(0.0, traffic, calibration.costs[recipe], cluster)
    peak = _peak(model, fragments)
    turn_s = whole.step_s * peak / fragments
    turn_steps = period / fragments
    if delay is None:
        delay = min(math.ceil(turn_s / compute_s), max(1, math.floor(turn_steps)))
        delay = 0 if cluster.num_workers == 1 else delay
    waiting_s = max(0.0, turn_s - delay * compute_s)
    # Averaging takes CPU time from the steps beside it where a worker has less than two cores.
    lost_s = cluster.contention * (whole.step_s - _link_s(traffic, cluster)) / period
    return OuterPrediction(
        step_s=compute_s + waiting_s / turn_steps + max(0.0, lost_s),
        compute_s=compute_s,
        bytes_per_step=round(whole.bytes_per_step / period),
        turn_bytes=round(whole.bytes_per_step * peak / fragments),
        peak=peak,
        turn_s=turn_s,
        delay=delay,
        least_period=max(1, math.ceil(whole.step_s / (_MOST_BUSY * compute_s))),
    )


def _peak(model: Model, fragments: int) -> float:
    """Return the values of the largest fragment over those of a mean one; 1 if layers are not known."""
    if not isinstance(model, nn.Module):
        return 1.0
    numels = {name: p.numel() for name, p in trainable_parameters(model).items()}
    divided = gradwire.DiLoCo(fragments=fragments).divide(numels)
    return max(sum(numels[name] for name in own) for own in divided) * fragments / sum(numels.values())


def _link_s(traffic: StepTraffic, cluster: Cluster) -> float:
    return sum(cluster.link_s(bucket.node_bytes, traffic.messages_meet) for bucket in traffic.buckets)
