"""The first failure of a wire, shared by its ranks through the group's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from gradwire.errors import PeerError, Place, WireError
from gradwire.peers.failure_store import FailureStore, Standing
from gradwire.peers.groups import ClosedGroup

# A rank posts its text before it closes its connections, so whoever sees them closed finds the text at
# once; a rank that was killed posts nothing, and this is how long others look for it.
_PATIENCE_S = 0.5
# Gloo's own word for it; it says something else when a connection has closed.
_TIMED_OUT = "Timed out"


class Failure:
    """What went wrong first, as far as this rank knows. Once set, it stays."""

    def __init__(self, group: dist.ProcessGroup | None, prefix: str) -> None:
        """Share it with the ranks of ``group``; without one, keep it to this rank."""
        self.error: WireError | None = None
        self.store = None if group is None or group.size() == 1 else FailureStore(group, prefix)
        self._lock = threading.Lock()

    def set(self, error: WireError) -> None:
        """Keep ``error`` unless there is one already, and leave its text for the other ranks."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            if not isinstance(error, PeerError) and self.store is not None:
                self.store.post_failure(str(error))

    def settle(self) -> None:
        """Wait until the text of a failure, if there is one, has been left for the other ranks."""
        if self._lock.acquire(timeout=10):
            self._lock.release()

    def left_by_peers(self) -> str | None:
        """The text of a failure, if some rank has left one by now."""
        return None if self.store is None else self.store.failure()

    def ask_peers(self) -> PeerError | None:
        """The failure that some rank has left, or None when there is none for a while."""
        give_up = time.monotonic() + _PATIENCE_S
        while self.store is not None and self.store.answers:
            if (text := self.left_by_peers()) is not None:
                return PeerError(text)
            if time.monotonic() >= give_up:
                break
            time.sleep(0.02)
        return None

    def explain(self, place: Place, closed: ClosedGroup, close: Callable[[], None]) -> WireError:
        """Why a message has not come: what another rank has left, or who it is that all wait for.

        Says where this rank stands before it calls ``close``, which tells the others to say so too.
        """
        timed_out = _TIMED_OUT in str(closed)
        if self.store is not None:
            standing = Standing(place.step, place.bucket, waits_for=closed.peer, timed_out=timed_out)
            self.store.post_standing(standing)
        close()
        told = self.ask_peers()
        return told or WireError(f"{place}: {closed}. {self.name_the_last(closed.peer, timed_out=timed_out)}")

    def name_the_last(self, peer: int | None = None, *, timed_out: bool) -> str:
        """Which rank is furthest behind, beginning with ``peer``, for whom this rank waits; and what to do.

        ``timed_out`` says that this rank has waited long; if not, a connection has closed.
        """
        store = self.store
        if store is None:
            return ""
        standings: dict[int, Standing] = {}
        silent = []
        ranks = list(range(store.size)) if peer is None else [peer]
        # From rank to rank, by whom each waits for: who says nothing is the one that keeps all.
        for rank in ranks:
            standing = store.standing(rank)
            if standing is None:
                silent.append(rank)
                continue
            standings[rank] = standing
            following = standing.waits_for
            if following is not None and following not in ranks:
                ranks.append(following)
        if not store.answers:
            return (
                "The group's store does not answer, so the other ranks cannot be asked. It lives with rank "
                "0 if init_process_group has made it: then that is the rank that died or is stopped"
            )
        # A rank that gives up after the timeout closes its connections: others may see nothing but that.
        timed_out = timed_out or any(standing.timed_out for standing in standings.values())
        waiting = "".join(f"Rank {rank} {standing}. " for rank, standing in list(standings.items())[:4])
        advice = ". Raise the timeout of init_process_group if it is only slow" if timed_out else ""
        if silent:
            who = ", ".join(map(str, silent[:8]))
            fate = "left, died, is stopped or stuck" if timed_out else "left or died"
            return (
                f"{waiting}Furthest behind is rank {who}, which says nothing: it {fate}; its own output says "
                f"why{advice}"
            )
        order = min(standing.order for standing in standings.values())
        last = ", ".join(str(rank) for rank, standing in standings.items() if standing.order == order)
        return f"{waiting}Furthest behind is rank {last}; see what it does there{advice}"
