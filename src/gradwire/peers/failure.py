"""The first failure of a wire, shared by its ranks through the group's store."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from gradwire.errors import PeerError, Place, WireError
from gradwire.peers import last_words
from gradwire.peers.failure_store import FailureStore, RankStatus
from gradwire.peers.gloo import TIMED_OUT, close_connections
from gradwire.peers.groups import PeerUnreachable
from gradwire.peers.process_groups import world_ranks
from gradwire.peers.store_connections import STORE_IS_SILENT

# A rank posts its text before it closes its connections, so ranks that see them closed find the text at
# once. A rank that was killed posts nothing; the others give up looking for its text after this long.
_PATIENCE_S = 0.5
# Ranks that see a connection closed say that they are there. Those that have not, after this long, are not.
_ROLL_CALL_S = 5.0
# Longer than the others need to look for the text; a rank that was killed never knows.
_KNOWN_S = 2.0
# In the errors of Gloo, of torch's sockets and of the store when another rank cannot be reached.
_UNREACHABLE = re.compile(
    r"gloo|Connection (closed|reset|refused)|Broken pipe|Failed to recv|timed ?out",
    re.IGNORECASE,
)


class Failure:
    """The first error of a wire, as far as this rank knows. Once set, it stays."""

    def __init__(self, group: dist.ProcessGroup | None, prefix: str) -> None:
        """Share errors with the ranks of ``group``; without a group, keep them on this rank."""
        self.error: WireError | None = None
        self.store = None if group is None or group.size() == 1 else FailureStore(group, prefix)
        self._names: Sequence[int] = () if group is None else world_ranks(group)
        self._lock = threading.Lock()
        self._group: Callable[[], dist.ProcessGroup | None] = (
            (lambda: None) if group is None else weakref.ref(group)
        )
        if self.store is not None:
            last_words.register(self)

    @property
    def own_name(self) -> int:
        """The rank by which texts for the other ranks name this one."""
        assert self.store is not None, "nobody else reads them"
        return self._names[self.store.rank]

    def set(self, error: WireError) -> None:
        """Keep ``error`` and post its text for the other ranks; do nothing after the first error."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            if self.store is not None:
                if not isinstance(error, PeerError):
                    self.store.post_failure(str(error))
                self.store.post_known()

    def wait_until_posted(self) -> None:
        """Wait until a `set` that another thread has begun is over, for at most ten seconds."""
        if self._lock.acquire(timeout=10):
            self._lock.release()

    def wait_until_known(self) -> None:
        """Wait up to two seconds until all ranks know of the failure, if this process may host the store.

        Call it when this process ends: the store, and the failure's text in it, may end with the process.
        """
        if self.error is None or self.store is None or not _may_host_store():
            return
        deadline = time.monotonic() + _KNOWN_S
        while self.store.is_reachable and self.store.num_knowing() < self.store.size:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)

    def posted_text(self) -> str | None:
        """Return the text of the failure that a rank has posted, or None if there is none so far."""
        return None if self.store is None else self.store.failure()

    def wait_for_peer_error(self) -> PeerError | None:
        """Wait up to half a second for the failure that a rank has posted; return None if there is none."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.store is not None and self.store.is_reachable:
            if (text := self.posted_text()) is not None:
                return PeerError(text)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        return None

    def explain(self, place: Place, unreachable: PeerUnreachable, close: Callable[[], None]) -> WireError:
        """Return the error for a message that did not come: a peer's failure, or who is furthest behind.

        Posts this rank's status before it calls ``close``: closing makes the other ranks look for it.
        """
        peer, timed_out = unreachable.peer, TIMED_OUT.search(str(unreachable)) is not None
        if self.store is not None:
            status = RankStatus(place.step, place.bucket, waits_for=peer, timed_out=timed_out)
            self.store.post_status(status)
        close()
        if (error := self.wait_for_peer_error()) is not None:
            return error
        return WireError(
            f"{place}: {unreachable}. {self.describe_furthest_behind(peer, timed_out=timed_out)}"
        )

    def describe_loss(self) -> str:
        """Say why a rank cannot be reached, when not this wire but a collective of torch's has found out."""
        assert self.store is not None
        self.store.post_status(RankStatus(-1, -1, is_cut_off=True))
        if (group := self._group()) is not None:
            close_connections(group)  # the other ranks, which may wait in it, then tell the same
        error = self.wait_for_peer_error() or PeerError(self.describe_furthest_behind(timed_out=False))
        self.set(error)
        return str(error)

    def describe_furthest_behind(self, peer: int | None = None, *, timed_out: bool) -> str:
        """Name the rank that is furthest behind, and what to do about it.

        Args:
            peer: the rank that this one waits for; if None, all ranks are asked.
            timed_out: True if this rank has waited for the whole timeout; False if a connection has closed.
        """
        store = self.store
        if store is None:
            return ""
        statuses, silent = _call_roll(store, peer, timed_out=timed_out)
        if not store.is_reachable:
            return STORE_IS_SILENT
        # A rank that gives up after the timeout closes its connections, and others may see only that.
        timed_out = timed_out or any(status.timed_out for status in statuses.values())
        names = self._names or range(store.size)
        waiting = "".join(
            f"Rank {names[rank]} {status.describe(names)}. " for rank, status in list(statuses.items())[:4]
        )
        advice = ". Raise the timeout of init_process_group if it is only slow" if timed_out else ""
        if silent:
            who = ", ".join(str(names[rank]) for rank in silent[:8])
            fate = "left, died, is stopped or stuck" if timed_out else "left or died"
            return (
                f"{waiting}Furthest behind is rank {who}, which says nothing: it {fate}; its own output says "
                f"why{advice}"
            )
        order = min(status.order for status in statuses.values())
        last = ", ".join(str(names[rank]) for rank, status in statuses.items() if status.order == order)
        return f"{waiting}Furthest behind is rank {last}; see what it does there{advice}"


def _may_host_store() -> bool:
    """Return True if this process hosts the default store, unless torchrun does."""
    is_first = dist.is_initialized() and dist.get_rank() == 0
    return is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def is_unreachable(error: BaseException) -> bool:
    """Return True if an error of torch's says that another rank, or the store, cannot be reached.

    >>> is_unreachable(RuntimeError("Connection closed by peer [127.0.0.1]:80")), is_unreachable(KeyError(1))
    (True, False)
    """
    return isinstance(error, RuntimeError) and _UNREACHABLE.search(str(error)) is not None


def _call_roll(
    store: FailureStore, peer: int | None, *, timed_out: bool
) -> tuple[dict[int, RankStatus], list[int]]:
    """Return what `_follow_waits` finds when at most one rank is silent, or the silent had their time."""
    everyone = range(store.size)
    asked = everyone if peer is None else [peer]
    statuses, silent = _follow_waits(store, asked)
    if not silent and (not timed_out or _follow_waits(store, everyone)[1]):
        # The peer is there: it has closed, or waits in torch, because of another rank.
        asked = everyone
        statuses, silent = _follow_waits(store, asked)
    deadline = time.monotonic() + _ROLL_CALL_S
    while len(silent) > 1 and store.is_reachable and time.monotonic() < deadline:
        time.sleep(0.02)
        statuses, silent = _follow_waits(store, asked)
    return statuses, silent


def _follow_waits(store: FailureStore, asked: Iterable[int]) -> tuple[dict[int, RankStatus], list[int]]:
    """Return the statuses of ranks and of those they wait for, and the ranks that posted none.

    Following who waits for whom leads to a rank that has posted nothing: the others wait for it.
    """
    statuses: dict[int, RankStatus] = {}
    silent, ranks = [], list(asked)
    for rank in ranks:  # grows while it is read
        status = store.status(rank)
        if status is None:
            silent.append(rank)
            continue
        statuses[rank] = status
        if status.waits_for is not None and status.waits_for not in ranks:
            ranks.append(status.waits_for)
    return statuses, silent
