"""The distance between ranks: the time that a message takes from one to another."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from gradwire.peers.agreement import SealedClaim, gather_if_same
from gradwire.peers.gloo import GlooGroup
from gradwire.peers.groups import PeerUnreachable
from gradwire.peers.process_groups import timeout_of
from gradwire.peers.store_connections import LimitedStore, limited_store

# A bucket takes the time of one and a half round trips, and two buckets are in flight. The rest of a backward
# pass hides that if trips are short.
_FAR_S = 0.05
_NUM_TRIES = 3


def is_far(group: dist.ProcessGroup, peers: GlooGroup) -> bool:
    """Return True if a round trip to the store takes long on some rank; collective over ``peers``.

    All ranks return the same. The store's own threads answer, so a busy rank does not seem far.
    """
    store = limited_store(group, timeout_of(group))
    nearest_s = min(_round_trip_s(store) for _ in range(_NUM_TRIES))
    try:
        everyone_s = gather_if_same(SealedClaim({}), nearest_s, peers, torch.device("cpu"))
    except PeerUnreachable as error:
        raise RuntimeError(f"rank {peers.rank}: {error}, while gradwire opened its connections") from error
    return max(everyone_s) > _FAR_S


def _round_trip_s(store: LimitedStore) -> float:
    begin = time.perf_counter()
    store.check(["gradwire/round trip"])
    return time.perf_counter() - begin
