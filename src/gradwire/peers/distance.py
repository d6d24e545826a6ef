"""The distance between ranks: the time that a message takes from one to another."""

from __future__ import annotations

import time

from gradwire.peers.store_connections import LimitedStore

_NUM_TRIES = 2


def round_trip_s(store: LimitedStore) -> float:
    """Return the time of a round trip from this rank to the group's store.

    The store's own threads answer, so a busy rank does not seem far.
    """
    return min(_try_s(store) for _ in range(_NUM_TRIES))


def _try_s(store: LimitedStore) -> float:
    begin = time.perf_counter()
    store.check(["gradwire/round trip"])
    return time.perf_counter() - begin
