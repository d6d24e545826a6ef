"""The engine: it takes buckets to a lane, in stages, and keeps the state that a checkpoint holds.

Nothing here knows DDP: `ddp`, `training` and loops without DDP call the engine.
"""

from gradwire.averaging import checkpoint
from gradwire.averaging.bucket import Bucket
from gradwire.averaging.checkpoint import merge_state_dicts
from gradwire.averaging.coalesce import Coalescer
from gradwire.averaging.disabling import disabling_claim, is_disabled
from gradwire.averaging.engine import Engine, open_engine
from gradwire.averaging.gathering import gather_states
from gradwire.averaging.grid import Grid
from gradwire.averaging.layout_check import LayoutCheck
from gradwire.averaging.native import NativeMean
from gradwire.averaging.pending import Pending
from gradwire.averaging.saved_files import read_saved
from gradwire.averaging.scaling import require_weight
from gradwire.averaging.state import RunState
from gradwire.averaging.timeline import Grouping, Timeline, grouping_of
from gradwire.averaging.tuned import Share, Tuned

__all__ = [
    "Bucket",
    "Coalescer",
    "Engine",
    "Grid",
    "Grouping",
    "LayoutCheck",
    "NativeMean",
    "Pending",
    "RunState",
    "Share",
    "Timeline",
    "Tuned",
    "checkpoint",
    "disabling_claim",
    "gather_states",
    "grouping_of",
    "is_disabled",
    "merge_state_dicts",
    "open_engine",
    "read_saved",
    "require_weight",
]
