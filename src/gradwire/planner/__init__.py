"""What a step would take on hardware that is not there: predicted from bytes, links and measured kernels."""

from gradwire.planner.calibration import Calibration, calibrate
from gradwire.planner.cost import Bucket, Cluster, Costs, Prediction, Wire, predict_step
from gradwire.planner.plans import predict, shapes_of, wire_of
from gradwire.planner.shapes import typical_shapes

__all__ = [
    "Bucket",
    "Calibration",
    "Cluster",
    "Costs",
    "Prediction",
    "Wire",
    "calibrate",
    "predict",
    "predict_step",
    "shapes_of",
    "typical_shapes",
    "wire_of",
]
