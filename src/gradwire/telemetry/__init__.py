"""Figures about averaging: statistics, errors beside exact means, and the events written to files.

Nothing here changes what is averaged.
"""

from gradwire.telemetry.meter import Meter, ScaleOf
from gradwire.telemetry.recorder import Recorder, Telemetry
from gradwire.telemetry.stats import BucketStats, ParameterStats, StatsBook, StepStats, WireStats

__all__ = [
    "BucketStats",
    "Meter",
    "ParameterStats",
    "Recorder",
    "ScaleOf",
    "StatsBook",
    "StepStats",
    "Telemetry",
    "WireStats",
]
