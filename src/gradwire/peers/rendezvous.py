"""Names under which ranks meet in their group's store, whatever an earlier run has left there."""

from __future__ import annotations

import json
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_FIRST = "gradwire/first"  # under which rank 0 writes its name
_SLOWEST_POLL_S = 0.05


@dataclass
class _Company:
    """This process among the ranks of a group: its own name, that of all when they know it, and a count."""

    own: str = field(default_factory=lambda: uuid.uuid4().hex)
    name: str | None = None
    num_meetings: int = 0


_companies: weakref.WeakKeyDictionary[dist.ProcessGroup, _Company] = weakref.WeakKeyDictionary()


def next_rendezvous(group: dist.ProcessGroup) -> str:
    """A name that is new to the group, and the same on each rank if all ask equally often.

    Counted in the store, so that it is new also to a group that was destroyed and made again there. For
    hooks, which must not wait for others; all else uses `join_rendezvous`.
    """
    number = group.get_group_store().add(f"gradwire/meetings/{group.rank()}", 1)
    return f"gradwire/{number}"


def join_rendezvous(group: dist.ProcessGroup, timeout: timedelta, caller: str = "gradwire.attach") -> str:
    """A name as `next_rendezvous` gives, that of one process of each rank and of no other; collective.

    See the note *Stores that outlive their ranks*. Raises RuntimeError when a rank does not come in time.
    """
    company = _companies.setdefault(group, _Company())
    company.num_meetings += 1
    if company.name is None:
        company.name = _gather(group, company, timeout, caller)
    return _meeting(company.name, company.num_meetings)


def give_up(
    group: dist.ProcessGroup, meeting: str, missing: Sequence[int], timeout: timedelta, caller: str
) -> RuntimeError:
    """What to raise when ``missing`` have not come; those who come later find that this rank has gone."""
    rank, size, ranks = group.rank(), group.size(), ", ".join(map(str, missing))
    text = f"error: it gave up waiting for rank(s) {ranks}"
    group.get_group_store().set(claim_key(meeting, rank), text)
    return RuntimeError(
        f"rank {rank}: {caller} is collective, but rank(s) {ranks} of {size} did not call it within "
        f"{timeout.total_seconds():g} s; every rank of the model's process group must"
    )


def claim_key(meeting: str, rank: int) -> str:
    """Where in the store a rank says what it has come for."""
    return f"{meeting}/claim/{rank}"


# Note [Stores that outlive their ranks]
# torchrun keeps one store for all that it starts, so a rank that was started again finds there what dead ones
# have left. Where one of them had died before a meeting that the others were in, counts kept there differ
# for ever, and what a rank reads of a peer may be a dead one's. So every process gives itself a name. Rank 0
# writes its own; the others answer under that name with theirs, again whenever it changes; when all have,
# rank 0 says whom it has seen. Who finds itself among them knows that rank 0 lives, for a dead one cannot
# have seen it, and rank 0's name is from then on that of all.
def _gather(group: dist.ProcessGroup, company: _Company, timeout: timedelta, caller: str) -> str:
    """The name of all, when all are there."""
    store: Any = group.get_group_store()
    rank, others, name = group.rank(), range(1, group.size()), ""

    def has_seen_all() -> bool:
        return all(store.check([_answer_key(name, peer)]) for peer in others)

    def is_seen() -> bool:
        nonlocal name
        if store.check([_FIRST]) and (first := store.get(_FIRST).decode()) != name:
            name = first
            store.set(_answer_key(name, rank), company.own)
        seen = _seen_key(name)
        return bool(name) and store.check([seen]) and company.own in json.loads(store.get(seen))

    if rank == 0:
        name = company.own
        store.set(_FIRST, name)
    if not _poll(has_seen_all if rank == 0 else is_seen, time.monotonic() + timeout.total_seconds()):
        missing = [peer for peer in others if name and not store.check([_answer_key(name, peer)])]
        meeting = _meeting(name, company.num_meetings)
        raise give_up(group, meeting, missing or [0], timeout, caller)
    if rank == 0:
        answers = [store.get(_answer_key(name, peer)).decode() for peer in others]
        store.set(_seen_key(name), json.dumps(answers))
    return name


def _meeting(name: str, number: int) -> str:
    return f"gradwire/{name}/{number}"


def _answer_key(name: str, rank: int) -> str:
    return f"gradwire/{name}/answer/{rank}"


def _seen_key(name: str) -> str:
    return f"gradwire/{name}/seen"


def _poll(is_over: Callable[[], bool], deadline: float) -> bool:
    """Ask until it is over or the deadline is; False then."""
    pause_s = 0.001
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
    return True
