"""Where averaging runs: worker threads for CPU buckets, a side stream for CUDA ones.

What a task does is its caller's business.
"""

from gradwire.lanes.lane import Lane, open_lane, open_local_lane
from gradwire.lanes.lifetime import end_with, join_threads
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
    "Run",
    "Task",
    "collective_task",
    "completed",
    "end_with",
    "join_threads",
    "open_lane",
    "open_local_lane",
    "report_nothing",
]
