"""The texts that the ranks of a wire leave for each other in the group's store when something goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from gradwire.errors import encodable
from gradwire.peers.store_connections import begin
from gradwire.torch_private import PrefixStore, Store, has_tcp_store, own_connection, store_of

T = TypeVar("T")

# The store's own timeout does not help when its host is stopped: a request then waits for ever.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class RankStatus:
    """The bucket that a rank averages or, if ``is_done``, the last one it has averaged."""

    step: int
    """-1 before the first bucket."""
    bucket: int
    is_done: bool = False
    waits_for: int | None = None
    """The rank whose message this one waits for."""
    timed_out: bool = False
    """True if the rank has waited for the whole timeout."""
    doing: str = ""
    """The activity of the user's code between buckets."""
    is_cut_off: bool = False
    """True if a collective of torch's has failed on it because of another rank."""

    @property
    def order(self) -> tuple[bool, int, int, bool]:
        """A key that sorts ranks by progress, those furthest behind first."""
        return self.is_cut_off, self.step, self.bucket, self.is_done

    def describe(self, names: Sequence[int]) -> str:
        """Return it as text; ``names`` has the ranks that texts name, in rank order."""
        doing = f"; {self.doing}" if self.doing else ""
        if self.is_cut_off:
            return "is there, and has lost a connection too"
        if self.step < 0:
            return f"has started no bucket yet{doing}"
        place = f"step {self.step}, bucket {self.bucket}"
        if self.is_done:
            return f"has averaged {place} and started no bucket since{doing}"
        return f"is in {place}" + (
            "" if self.waits_for is None else f" and waits for rank {names[self.waits_for]}"
        )


class FailureStore:
    """The first failure's text and every rank's status, in the group's store.

    No method raises, or waits longer than two seconds. The store is asked over a connection of its own,
    since the user's thread may be waiting in the other one. A thread makes that connection from the start:
    connecting to a host that is gone takes longer than the store's timeout, which is five minutes.
    """

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.is_reachable = True
        """False after the first request without an answer: the store's host is dead or stopped."""
        self._prefix = prefix
        # Not the group itself, which may end before this does.
        self._users_store, self._group_name = store_of(group), group.group_name
        # Other stores have no connection to make, and a FileStore counts its clones.
        self._opening = self._open() if has_tcp_store(self._users_store) else None

    def post_failure(self, text: str) -> None:
        """Post the text of a failure, unless a rank has posted one."""
        # A store takes valid UTF-8 only.
        self._ask(lambda store: store.compare_set("failure", "", encodable(text)))

    def failure(self) -> str | None:
        """Return the text of the first failure, or None if there is none."""
        return self._read("failure")

    def post_known(self) -> None:
        """Note that this rank knows of the failure."""
        self._ask(lambda store: store.add("known", 1))

    def num_knowing(self) -> int:
        """Return the number of ranks that know of the failure."""
        return self._ask(lambda store: store.add("known", 0)) or 0

    def post_status(self, status: RankStatus) -> None:
        """Post this rank's status, in place of an earlier one."""
        self._ask(lambda store: store.set(f"status/{self.rank}", json.dumps(asdict(status))))

    def withdraw_status(self) -> None:
        """Remove this rank's status."""
        # The key stays: a rank that has found it would wait for one that is gone.
        self._ask(lambda store: store.set(f"status/{self.rank}", ""))

    def status(self, rank: int) -> RankStatus | None:
        """Return the status that ``rank`` has posted, or None if there is none."""
        text = self._read(f"status/{rank}")
        return None if text is None else RankStatus(**json.loads(text))

    def _read(self, key: str) -> str | None:
        value = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return value.decode(errors="replace") if value else None

    def _open(self) -> Future[Store]:
        return begin(lambda: own_connection(self._users_store, self._group_name))

    def _ask(self, request: Callable[[PrefixStore], T]) -> T | None:
        """Return the store's answer; return None if it does not answer in time, and at once from then on."""
        if not self.is_reachable:
            return None

        def ask() -> T:
            store = PrefixStore(self._prefix, opening.result())
            store.set_timeout(timedelta(seconds=_PATIENCE_S))
            return request(store)

        try:
            opening = self._opening = self._opening or self._open()
            answer = begin(ask)
        except RuntimeError:  # from Python 3.12 on, if the interpreter is ending
            return None
        try:
            return answer.result(_PATIENCE_S)
        except (RuntimeError, TimedOut):
            self.is_reachable = False
            return None
