"""gradwire: fast, small and correct gradient averaging for PyTorch data parallel."""

from gradwire.attachment import attach
from gradwire.checkpoint import merge_state_dicts
from gradwire.errors import PeerError, WireError
from gradwire.local_sgd import DiLoCo, LocalSGD, SlowMo
from gradwire.overlap import OverlappedOptimizer, overlap_optimizer
from gradwire.recipes import RECIPES, Recipe, bf16, fp16, fp32, noop, recipe, route, schedule
from gradwire.stats import BucketStats, ParameterStats, StepStats, WireStats
from gradwire.telemetry import Telemetry
from gradwire.version import __version__
from gradwire.wire import Wire

__all__ = [
    "RECIPES",
    "BucketStats",
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
