"""Communication with the other ranks: groups, rendezvous, agreement, and reports of failures and stalls.

The content of messages, and the thread or stream that sends them, do not belong here.
"""

from gradwire.peers.agreement import Claim, SealedClaim, agree, gather_if_same, require_same
from gradwire.peers.collective import CollectiveCall, GridCall
from gradwire.peers.distance import round_trip_s
from gradwire.peers.failure import Failure, is_unreachable
from gradwire.peers.failure_store import RankStatus
from gradwire.peers.gloo import (
    GlooGroup,
    close_connections,
    make_late_gloo,
    open_gloo,
    open_gloo_groups,
)
from gradwire.peers.gloo_threads import wait_until_asleep
from gradwire.peers.groups import (
    Group,
    Messages,
    PeerUnreachable,
    SingleRankGroup,
    Subgroup,
    Traffic,
    gather,
    gather_by_nodes,
    gather_matrix,
    gather_rows,
)
from gradwire.peers.mailboxes import looks_ahead
from gradwire.peers.nccl import NcclGroup
from gradwire.peers.process_groups import (
    all_gather_bytes,
    all_gather_single,
    backend_name,
    bytes_tensor,
    is_in_world,
    make_group,
    own_world_rank,
    require_timeout,
    timeout_of,
    timeout_or_own,
    uses_nccl,
    world_ranks,
)
from gradwire.peers.rendezvous import join_rendezvous, next_rendezvous
from gradwire.peers.stall_watcher import Progress, StallWatcher
from gradwire.peers.store_connections import begin, limited_store

__all__ = [
    "Claim",
    "CollectiveCall",
    "Failure",
    "GlooGroup",
    "GridCall",
    "Group",
    "Messages",
    "NcclGroup",
    "PeerUnreachable",
    "Progress",
    "RankStatus",
    "SealedClaim",
    "SingleRankGroup",
    "StallWatcher",
    "Subgroup",
    "Traffic",
    "agree",
    "all_gather_bytes",
    "all_gather_single",
    "backend_name",
    "begin",
    "bytes_tensor",
    "close_connections",
    "gather",
    "gather_by_nodes",
    "gather_if_same",
    "gather_matrix",
    "gather_rows",
    "is_in_world",
    "is_unreachable",
    "join_rendezvous",
    "limited_store",
    "looks_ahead",
    "make_group",
    "make_late_gloo",
    "next_rendezvous",
    "open_gloo",
    "open_gloo_groups",
    "own_world_rank",
    "require_same",
    "require_timeout",
    "round_trip_s",
    "timeout_of",
    "timeout_or_own",
    "uses_nccl",
    "wait_until_asleep",
    "world_ranks",
]
