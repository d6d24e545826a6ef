"""Child processes: start them as ranks, watch them together, and end them with all that they started.

What the children run does not belong here.
"""

from gradwire.processes.children import (
    describe_exit,
    end_with_parent,
    kill_group,
    kill_groups,
    terminate_all,
    wait_for_all,
)
from gradwire.processes.torchrun import free_port, rank_environment, under_torchrun

__all__ = [
    "describe_exit",
    "end_with_parent",
    "free_port",
    "kill_group",
    "kill_groups",
    "rank_environment",
    "terminate_all",
    "under_torchrun",
    "wait_for_all",
]
