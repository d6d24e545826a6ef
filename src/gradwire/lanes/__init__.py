"""Lanes, which run tasks in order: on worker threads for CPU buckets, on a side stream for CUDA buckets.

What a task computes and sends belongs to `exchanges` and `averaging`.
"""

from gradwire.lanes.lane import Lane, open_lane, open_local_lane
from gradwire.lanes.lifetime import Uncopied, is_exiting, join_threads, register_finalizer
from gradwire.lanes.recordings import RecordedRun, Repeat, RepeatKey, may_record, no_collection
from gradwire.lanes.task import (
    CollectiveWork,
    Promise,
    Run,
    Task,
    collective_task,
    completed,
    report_nothing,
)

__all__ = [
    "CollectiveWork",
    "Lane",
    "Promise",
    "RecordedRun",
    "Repeat",
    "RepeatKey",
    "Run",
    "Task",
    "Uncopied",
    "collective_task",
    "completed",
    "is_exiting",
    "join_threads",
    "may_record",
    "no_collection",
    "open_lane",
    "open_local_lane",
    "register_finalizer",
    "report_nothing",
]
