"""What a step would take on hardware that is not there: predicted from bytes, links and measured kernels."""

from gradwire.planner.calibration import Calibration, calibrate
from gradwire.planner.cost import Cluster, Costs, Prediction, Wire, predict_step
from gradwire.planner.plans import predict, wire_of

__all__ = [
    "Calibration",
    "Cluster",
    "Costs",
    "Prediction",
    "Wire",
    "calibrate",
    "predict",
    "predict_step",
    "wire_of",
]
