"""Run a function on real Gloo ranks, each a process of this machine or of a lab.

What the function checks or measures does not belong here.
"""

from gradwire.ranks.rank_main import send_message, time_limit
from gradwire.ranks.running import RanksFailed, run_ranks
from gradwire.ranks.shared_gpus import runs_at_once, sharing_gpus

__all__ = ["RanksFailed", "run_ranks", "runs_at_once", "send_message", "sharing_gpus", "time_limit"]
