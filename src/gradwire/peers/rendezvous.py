"""Names under which ranks meet in their group's store, whatever an earlier run has left there."""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from gradwire.peers.process_groups import world_ranks
from gradwire.peers.store_connections import LimitedStore, limited_store

_FIRST_KEY = "gradwire/first"
"""The key under which rank 0 writes its process name."""
_SLOWEST_POLL_S = 0.05
_ABSENT = "absent"
"""A text that no key holds; a store returns it for a key that is not set."""
SLOW_S = 10.0
"""The wait after which a rank logs whom it is waiting for."""

log = logging.getLogger("gradwire")


class WaitLog:
    """Log once for whom a rank is waiting, when it has waited for `SLOW_S` seconds."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, caller: str) -> None:
        self._group, self._timeout, self._caller = group, timeout, caller
        self._start = time.monotonic()
        self._is_over = False

    @property
    def left_s(self) -> float:
        """The number of seconds until `tell` has something to log; infinite if it has logged."""
        return math.inf if self._is_over else self._start + SLOW_S - time.monotonic()

    def tell(self, missing: Callable[[], Sequence[int]]) -> None:
        """Log the ranks that ``missing`` returns, if it is time to and there are any."""
        if self.left_s <= 0:
            self._is_over = True
            names, peers = world_ranks(self._group), missing()
            if not peers:  # the last ones have come just now
                return
            log.warning(
                "rank %d waits in %s for rank(s) %s of a group of %d, which have not called it; it will "
                "wait for %g s in all. Every rank of the process group must call it",
                names[self._group.rank()],
                self._caller,
                ", ".join(str(names[peer]) for peer in peers),
                self._group.size(),
                self._timeout.total_seconds(),
            )


@dataclass
class _Session:
    """The present processes of a group's ranks, as this process knows them."""

    process_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The name of this process, unlike that of any other."""
    name: str | None = None
    """The name of the session, the same on all ranks; None before they have met."""
    num_rendezvous: int = 0


_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, _Session] = weakref.WeakKeyDictionary()


def next_rendezvous(group: dist.ProcessGroup, timeout: timedelta) -> str:
    """Return a rendezvous name without waiting for other ranks; for hooks, which must not wait.

    The name is new to the group, and the same on all ranks if all have called this equally often. The
    calls are counted in the store, so the name is also new to a group that was destroyed and made again.
    Everything else uses `join_rendezvous`. Raises RuntimeError if the store does not answer in time.
    """
    number = limited_store(group, timeout).add(f"gradwire/rendezvous/{group.rank()}", 1)
    return f"gradwire/{number}"


def join_rendezvous(group: dist.ProcessGroup, timeout: timedelta, caller: str) -> str:
    """Return a new rendezvous name, shared by one process per rank; collective.

    See Note [Stores that outlive their ranks]. Raises RuntimeError if a rank does not come in time, or the
    store does not answer; ``caller`` is the function that the error names.
    """
    session = _sessions.setdefault(group, _Session())
    session.num_rendezvous += 1
    if session.name is None:
        session.name = _meet(group, session, timeout, caller)
    return _rendezvous_name(session.name, session.num_rendezvous)


def missing_ranks_error(
    group: dist.ProcessGroup, rendezvous: str, missing: Sequence[int], timeout: timedelta, caller: str
) -> RuntimeError:
    """Return the error for ranks that did not come, and leave word for them that this rank has gone."""
    names, size = world_ranks(group), group.size()
    rank, ranks = names[group.rank()], ", ".join(str(names[peer]) for peer in missing)
    text = f"error: RuntimeError: it gave up waiting for rank(s) {ranks}"
    limited_store(group, timeout).set(claim_key(rendezvous, group.rank()), text)
    return RuntimeError(
        f"rank {rank}: {caller} is collective, but rank(s) {ranks} of a group of {size} did not call it "
        f"within {timeout.total_seconds():g} s; every rank of the process group must"
    )


def claim_key(rendezvous: str, rank: int) -> str:
    """Return the key under which a rank writes its claim to the store."""
    return f"{rendezvous}/claim/{rank}"


# Note [Stores that outlive their ranks]
# torchrun keeps one store for all processes that it starts, so a restarted rank finds there what dead
# processes have left. A rank that died before a rendezvous has counted fewer than the others, so counts in
# the store may differ for ever. And a rank may read the answer of a dead process for that of a peer.
#
# So every process gives itself a random name:
# 1. Rank 0 writes its name.
# 2. The other ranks answer under that name with their own names, and answer again when rank 0's name changes.
# 3. When all have answered, rank 0 writes the names it has seen.
# 4. A rank that finds its own name there knows that this rank 0 is alive: a dead one cannot have seen it.
# From then on, rank 0's name is the name of the session.
def _meet(group: dist.ProcessGroup, session: _Session, timeout: timedelta, caller: str) -> str:
    """Wait until all ranks are there, and return the name of the session."""
    if group.size() == 1:
        return session.process_name
    store = limited_store(group, timeout)
    meeting = (_FirstRank if group.rank() == 0 else _OtherRank)(store, group, session.process_name)
    slow = WaitLog(group, timeout, caller)

    def is_over() -> bool:
        slow.tell(meeting.missing)
        return meeting.is_over()

    if not _poll(is_over, time.monotonic() + timeout.total_seconds()):
        rendezvous = _rendezvous_name(meeting.name, session.num_rendezvous)
        raise missing_ranks_error(group, rendezvous, meeting.missing(), timeout, caller)
    return meeting.name


class _FirstRank:
    """Rank 0 in Note [Stores that outlive their ranks]: it writes its name, and waits for all answers."""

    def __init__(self, store: LimitedStore, group: dist.ProcessGroup, process_name: str) -> None:
        self.name = process_name
        self._store = store
        self._others = range(1, group.size())
        store.set(_FIRST_KEY, self.name)

    def is_over(self) -> bool:
        keys = [_answer_key(self.name, peer) for peer in self._others]
        if not self._store.check(keys):
            return False
        answers = [answer.decode() for answer in self._store.multi_get(keys)]
        self._store.set(_seen_key(self.name), json.dumps(answers))
        return True

    def missing(self) -> list[int]:
        """Return the ranks that have not answered."""
        return _without_answer(self._store, self.name, self._others) or [0]


class _OtherRank:
    """Any other rank: it answers to rank 0's name, and waits until rank 0 has seen the answer."""

    def __init__(self, store: LimitedStore, group: dist.ProcessGroup, process_name: str) -> None:
        self.name = ""
        """The name of rank 0; empty until rank 0 has written it."""
        self._store = store
        self._rank, self._others = group.rank(), range(1, group.size())
        self._process_name = process_name

    def is_over(self) -> bool:
        first = _read(self._store, _FIRST_KEY)
        if first is not None and first != self.name:
            self.name = first
            self._store.set(_answer_key(self.name, self._rank), self._process_name)
        seen = _read(self._store, _seen_key(self.name)) if self.name else None
        return seen is not None and self._process_name in json.loads(seen)

    def missing(self) -> list[int]:
        """Return the ranks that have not answered; rank 0 if it has no name yet, or all have answered."""
        return (_without_answer(self._store, self.name, self._others) if self.name else []) or [0]


def _without_answer(store: LimitedStore, name: str, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([_answer_key(name, rank)])]


def _rendezvous_name(session: str, number: int) -> str:
    return f"gradwire/{session}/{number}"


def _answer_key(name: str, rank: int) -> str:
    return f"gradwire/{name}/answer/{rank}"


def _seen_key(name: str) -> str:
    return f"gradwire/{name}/seen"


def _read(store: LimitedStore, key: str) -> str | None:
    """Return a value, or None if there is none, in one round trip: `check` takes one, and `get` two more."""
    # Nothing is set unless the value is the one that is expected, and then it stays.
    value = store.compare_set(key, _ABSENT, _ABSENT).decode()
    return None if value == _ABSENT else value


def _poll(is_over: Callable[[], bool], deadline: float) -> bool:
    """Ask ``is_over`` until it returns True; return False if the deadline passes first."""
    pause_s = 0.001
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
    return True
