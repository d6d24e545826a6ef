"""The other ranks: groups that exchange messages, rendezvous, agreement, and who failed or stalled.

Nothing here knows what is in a message.
"""

from gradwire.peers.agreement import Claim, agree, require_same
from gradwire.peers.collective import CollectiveCall
from gradwire.peers.failure import Failure
from gradwire.peers.failure_store import Standing
from gradwire.peers.gloo import GlooGroup, open_gloo
from gradwire.peers.groups import Alone, ClosedGroup, Group, Messages, Subgroup, Traffic, gather
from gradwire.peers.nccl import NcclGroup
from gradwire.peers.process_groups import backend_name, timeout_of
from gradwire.peers.rendezvous import join_rendezvous, next_rendezvous
from gradwire.peers.stall_watcher import Progress, StallWatcher

__all__ = [
    "Alone",
    "Claim",
    "ClosedGroup",
    "CollectiveCall",
    "Failure",
    "GlooGroup",
    "Group",
    "Messages",
    "NcclGroup",
    "Progress",
    "StallWatcher",
    "Standing",
    "Subgroup",
    "Traffic",
    "agree",
    "backend_name",
    "gather",
    "join_rendezvous",
    "next_rendezvous",
    "open_gloo",
    "require_same",
    "timeout_of",
]
