"""What a step would take on hardware that is not there: predicted from bytes, links and measured kernels."""

from gradwire.planner.calibration import Calibration, calibrate
from gradwire.planner.cost import Bucket, Cluster, Costs, Prediction, Wire, predict_step
from gradwire.planner.from_records import Forecast, bits_per_s, cores_per_worker
from gradwire.planner.plans import can_be_planned, predict, shapes_of, wire_of
from gradwire.planner.shapes import Shape, typical_shapes
from gradwire.planner.validation import CASES, Case, Comparison, validate

__all__ = [
    "CASES",
    "Bucket",
    "Calibration",
    "Case",
    "Cluster",
    "Comparison",
    "Costs",
    "Forecast",
    "Prediction",
    "Shape",
    "Wire",
    "bits_per_s",
    "calibrate",
    "can_be_planned",
    "cores_per_worker",
    "predict",
    "predict_step",
    "shapes_of",
    "typical_shapes",
    "validate",
    "wire_of",
]
