"""The distance between ranks: the time that a message takes from one to another."""

from __future__ import annotations

import time

import torch.distributed as dist

from gradwire.peers.process_groups import timeout_of
from gradwire.peers.store_connections import LimitedStore, limited_store

# A bucket takes the time of one and a half round trips, and two buckets are in flight. The rest of a backward
# pass hides that if trips are short.
_FAR_S = 0.05
_NUM_TRIES = 2


def is_far(group: dist.ProcessGroup) -> bool:
    """Return True if round trips from this rank to the group's store take long.

    The store's own threads answer, so a busy rank does not seem far.
    """
    store = limited_store(group, timeout_of(group))
    return all(_round_trip_s(store) > _FAR_S for _ in range(_NUM_TRIES))


def _round_trip_s(store: LimitedStore) -> float:
    begin = time.perf_counter()
    store.check(["gradwire/round trip"])
    return time.perf_counter() - begin
