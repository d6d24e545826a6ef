"""Fast, small and correct gradient averaging for PyTorch data parallel.

Training scripts find everything they need here. The other public modules are `gradwire.ddp_comm_hooks`,
`gradwire.testing` and `gradwire.lab`.
"""

import importlib
from typing import TYPE_CHECKING

from gradwire.version import __version__

if TYPE_CHECKING:
    from gradwire.averaging import merge_state_dicts
    from gradwire.ddp import Wire, wrap
    from gradwire.errors import PeerError, WireError
    from gradwire.loops import Averager, AveragingHandle
    from gradwire.peers import make_group
    from gradwire.recipes import (
        RECIPES,
        Recipe,
        acp,
        auto,
        bf16,
        fp8,
        fp16,
        fp32,
        int2,
        int3,
        int4,
        int8,
        noop,
        powersgd,
        recipe,
        route,
        schedule,
        sign,
        topk,
    )
    from gradwire.sharded import attach
    from gradwire.telemetry import BucketStats, ParameterStats, StepStats, Telemetry, WireStats
    from gradwire.training import DiLoCo, LocalSGD, OverlappedOptimizer, SlowMo, overlap_optimizer
    from gradwire.tuning import Decision

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
    "acp",
    "attach",
    "auto",
    "bf16",
    "fp8",
    "fp16",
    "fp32",
    "int2",
    "int3",
    "int4",
    "int8",
    "make_group",
    "merge_state_dicts",
    "noop",
    "overlap_optimizer",
    "powersgd",
    "recipe",
    "route",
    "schedule",
    "sign",
    "topk",
    "wrap",
]

# Imported when first used, so that `import gradwire` takes a millisecond.
_HOMES = {
    "averaging": ["merge_state_dicts"],
    "ddp": ["Wire", "wrap"],
    "errors": ["PeerError", "WireError"],
    "loops": ["Averager", "AveragingHandle"],
    "peers": ["make_group"],
    "recipes": [
        "RECIPES",
        "Recipe",
        "acp",
        "auto",
        "bf16",
        "fp8",
        "fp16",
        "fp32",
        "int2",
        "int3",
        "int4",
        "int8",
        "noop",
        "powersgd",
        "recipe",
        "route",
        "schedule",
        "sign",
        "topk",
    ],
    "sharded": ["attach"],
    "telemetry": ["BucketStats", "ParameterStats", "StepStats", "Telemetry", "WireStats"],
    "training": ["DiLoCo", "LocalSGD", "OverlappedOptimizer", "SlowMo", "overlap_optimizer"],
    "tuning": ["Decision"],
}
_PUBLIC_MODULES = ("ddp_comm_hooks", "lab", "testing")


def __getattr__(name: str) -> object:
    """Import a public name, or a public module, at its first use."""
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"gradwire.{name}")
    for home, names in _HOMES.items():
        if name in names:
            found: object = getattr(importlib.import_module(f"gradwire.{home}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})
