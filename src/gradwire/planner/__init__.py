"""Predict step times on hardware that is not there, from bytes, links and measured kernel speeds.

Measuring steps does not belong here, except to validate predictions.
"""

from gradwire.planner.calibration import Calibration, calibrate
from gradwire.planner.cost import BucketTraffic, Cluster, Costs, Prediction, StepTraffic, predict_step
from gradwire.planner.forecasts import Forecast, cores_per_worker, link_bits_per_s
from gradwire.planner.outer import predict_outer
from gradwire.planner.predictions import can_be_planned, predict, shapes_of, step_traffic
from gradwire.planner.shapes import Shape, typical_shapes
from gradwire.planner.sharded import ShardedPlan, predict_sharded, sharded_traffic
from gradwire.planner.validation import LAB_CASES, MAX_HOSTS_PER_CORE, Comparison, LabCase, validate

__all__ = [
    "LAB_CASES",
    "MAX_HOSTS_PER_CORE",
    "BucketTraffic",
    "Calibration",
    "Cluster",
    "Comparison",
    "Costs",
    "Forecast",
    "LabCase",
    "Prediction",
    "Shape",
    "ShardedPlan",
    "StepTraffic",
    "calibrate",
    "can_be_planned",
    "cores_per_worker",
    "link_bits_per_s",
    "predict",
    "predict_outer",
    "predict_sharded",
    "predict_step",
    "shapes_of",
    "sharded_traffic",
    "step_traffic",
    "typical_shapes",
    "validate",
]
