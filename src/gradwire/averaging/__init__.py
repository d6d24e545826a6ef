"""The engine: it takes buckets of any origin to a lane, in stages, and keeps the state a resume needs.

It knows no DDP.
"""

from gradwire.averaging.checkpoint import merge_state_dicts, read_layouts, write_layouts
from gradwire.averaging.regroup import Grouping, Timeline, grouping_of
from gradwire.averaging.runners import CollectiveWork, RecipeRunner, Runner, completed

__all__ = [
    "CollectiveWork",
    "Grouping",
    "RecipeRunner",
    "Runner",
    "Timeline",
    "completed",
    "grouping_of",
    "merge_state_dicts",
    "read_layouts",
    "write_layouts",
]
