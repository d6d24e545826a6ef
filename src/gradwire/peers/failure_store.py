"""What the ranks of a wire leave for each other in the group's store when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

T = TypeVar("T")

# A store whose host is stopped never answers, whatever its timeout is.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Standing:
    """How far a rank has come: the bucket it averages, or, if that is done, the last one it has averaged."""

    step: int
    bucket: int
    is_done: bool = False
    waits_for: int | None = None
    timed_out: bool = False
    """Whether it has waited for as long as the timeout."""
    doing: str = ""
    """Between buckets, what the user's own code does."""

    @property
    def order(self) -> tuple[int, int, bool]:
        return self.step, self.bucket, self.is_done

    def __str__(self) -> str:
        doing = f"; {self.doing}" if self.doing else ""
        if self.step < 0:
            return f"has brought no bucket yet{doing}"
        place = f"step {self.step}, bucket {self.bucket}"
        if self.is_done:
            return f"has averaged {place} and brought no bucket since{doing}"
        return f"is in {place}" + ("" if self.waits_for is None else f" and waits for rank {self.waits_for}")


class FailureStore:
    """The first failure's text, and every rank's standing. Nothing here waits long, or raises.

    It has a connection of its own: the user's thread may be waiting in the other one. That is made at
    once, since connecting to a host that is gone takes longer than the store's timeout, five minutes.
    """

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.answers = True
        """False when the store's host has not answered once: it is dead or stopped."""
        self._prefix = prefix
        self._users_store: Any = group.get_group_store()
        self._store: PrefixStore | None = None
        # Others connect to nothing, and a FileStore counts its clones.
        if isinstance(getattr(self._users_store, "_underlying_non_prefix_store", None), TCPStore):
            self._open()

    def post_failure(self, text: str) -> None:
        sendable = text.encode(errors="backslashreplace").decode()  # as names of files may need
        self._ask(lambda store: store.compare_set("failure", "", sendable))

    def failure(self) -> str | None:
        return self._read("failure")

    def post_standing(self, standing: Standing) -> None:
        self._ask(lambda store: store.set(f"standing/{self.rank}", json.dumps(asdict(standing))))

    def withdraw_standing(self) -> None:
        self._ask(lambda store: store.delete_key(f"standing/{self.rank}"))

    def standing(self, rank: int) -> Standing | None:
        text = self._read(f"standing/{rank}")
        return None if text is None else Standing(**json.loads(text))

    def _read(self, key: str) -> str | None:
        value = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if value is None else value.decode(errors="replace")

    def _open(self) -> PrefixStore:
        store = PrefixStore(self._prefix, self._users_store.clone())
        store.set_timeout(timedelta(seconds=_PATIENCE_S))
        self._store = store
        return store

    def _ask(self, question: Callable[[PrefixStore], T]) -> T | None:
        """The store's answer; None if it has none in time, and from then on."""
        if not self.answers:
            return None
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        failed = threading.Event()

        def ask() -> None:
            try:
                answers.put(question(self._store or self._open()))
            except RuntimeError:
                failed.set()
                answers.put(None)  # type: ignore[arg-type]

        # A thread that is left behind waits in the system, and keeps no interpreter from ending.
        threading.Thread(target=ask, name="gradwire-board", daemon=True).start()
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=_PATIENCE_S)
            self.answers = not failed.is_set()
            return answer
        self.answers = False
        return None
