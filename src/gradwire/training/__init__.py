"""Ways to train that build on averaging: local SGD with outer optimizers, and overlapped optimizer steps.

A new encoding or protocol does not belong here.
"""

from gradwire.training.local_sgd import LocalSGD
from gradwire.training.outer import DiLoCo, Outer, SlowMo
from gradwire.training.overlap import OverlappedOptimizer, overlap_optimizer

__all__ = [
    "DiLoCo",
    "LocalSGD",
    "Outer",
    "OverlappedOptimizer",
    "SlowMo",
    "overlap_optimizer",
]
