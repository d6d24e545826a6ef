"""Where averaging runs: worker threads for CPU buckets, a side stream for CUDA ones.

What a task does is its caller's business.
"""

from gradwire.lanes.lane import Lane, open_lane, open_local_lane
from gradwire.lanes.task import Run, Task, future_for, in_this_process, pass_on, report_nothing

__all__ = [
    "Lane",
    "Run",
    "Task",
    "future_for",
    "in_this_process",
    "open_lane",
    "open_local_lane",
    "pass_on",
    "report_nothing",
]
