"""Fast, small and correct gradient averaging for PyTorch data parallel.

Training scripts find everything they need here. The other public modules are `gradwire.ddp_comm_hooks`,
`gradwire.testing` and `gradwire.lab`.
"""

from gradwire.averaging import merge_state_dicts
from gradwire.ddp import Wire, attach
from gradwire.errors import PeerError, WireError
from gradwire.loops import Averager, AveragingHandle
from gradwire.recipes import RECIPES, Recipe, bf16, fp16, fp32, noop, recipe, route, schedule
from gradwire.telemetry import BucketStats, ParameterStats, StepStats, Telemetry, WireStats
from gradwire.training import DiLoCo, LocalSGD, OverlappedOptimizer, SlowMo, overlap_optimizer
from gradwire.tuning import Decision
from gradwire.version import __version__

__all__ = [
    "RECIPES",
    "Averager",
    "AveragingHandle",
    "BucketStats",
    "Decision",
    "DiLoCo",
    "LocalSGD",
    "OverlappedOptimizer",
    "ParameterStats",
    "PeerError",
    "Recipe",
    "SlowMo",
    "StepStats",
    "Telemetry",
    "Wire",
    "WireError",
    "WireStats",
    "__version__",
    "attach",
    "bf16",
    "fp16",
    "fp32",
    "merge_state_dicts",
    "noop",
    "overlap_optimizer",
    "recipe",
    "route",
    "schedule",
]
