"""Training methods built on averaging: local SGD, outer optimizers, and overlapped optimizer steps.

Encodings belong to `codecs`, protocols to `exchanges`, and the averaging itself to `averaging`.
"""

from gradwire.training.local_choices import parse_averaging
from gradwire.training.local_sgd import LocalSGD
from gradwire.training.outer import DiLoCo, Outer, SlowMo
from gradwire.training.overlap import OverlappedOptimizer, overlap_optimizer
from gradwire.training.partition import count_layers

__all__ = [
    "DiLoCo",
    "LocalSGD",
    "Outer",
    "OverlappedOptimizer",
    "SlowMo",
    "count_layers",
    "overlap_optimizer",
    "parse_averaging",
]
