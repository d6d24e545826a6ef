"""Run a function on real Gloo ranks, each a process of this machine or of a lab.

What the function checks or measures does not belong here.
"""

from gradwire.ranks.rank_main import send_message, time_limit
from gradwire.ranks.running import RanksFailed, run_ranks

__all__ = ["RanksFailed", "run_ranks", "send_message", "time_limit"]
