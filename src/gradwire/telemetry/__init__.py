"""Figures about averaging: statistics, errors against exact averages, and events written to files.

Code that changes what is averaged does not belong here.
"""

from gradwire.telemetry.meter import Meter
from gradwire.telemetry.recorder import HasLayouts, Recorder, Telemetry, combine
from gradwire.telemetry.stats import (
    BucketStats,
    Figure,
    ParameterStats,
    StatsCollector,
    StepStats,
    WireStats,
    total_of,
)

__all__ = [
    "BucketStats",
    "Figure",
    "HasLayouts",
    "Meter",
    "ParameterStats",
    "Recorder",
    "StatsCollector",
    "StepStats",
    "Telemetry",
    "WireStats",
    "combine",
    "total_of",
]
