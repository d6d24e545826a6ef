"""The first failure of a wire, shared by its ranks through the group's store."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from gradwire.errors import PeerError, WireError

# A rank posts its text before it closes its connections, so whoever sees them closed finds the text at
# once; a rank that was killed posts nothing, and this is how long others look for it.
_PATIENCE_S = 0.5
_STORE_TIMEOUT = timedelta(seconds=5)


class Failure:
    """What went wrong first, as far as this rank knows. Once set, it stays."""

    def __init__(self, group: dist.ProcessGroup | None, prefix: str) -> None:
        """Share it with the ranks of ``group``; without one, keep it to this rank."""
        self.error: WireError | None = None
        self._lock = threading.Lock()
        self._users_store: Any = None if group is None else group.get_group_store()
        self._prefix = prefix

    def set(self, error: WireError) -> None:
        """Keep ``error`` unless there is one already, and leave its text for the other ranks."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            if not isinstance(error, PeerError) and self._users_store is not None:
                self._post(str(error))

    def settle(self) -> None:
        """Wait until the text of a failure, if there is one, has been left for the other ranks."""
        if self._lock.acquire(timeout=_STORE_TIMEOUT.total_seconds() * 2):
            self._lock.release()

    def ask_peers(self) -> PeerError | None:
        """The failure that some rank has left, or None when there is none for a while."""
        # The store may have gone down with the rank that hosts it; then there is no text to find.
        with contextlib.suppress(RuntimeError):
            store, give_up = self._open_store(), time.monotonic() + _PATIENCE_S
            while not store.check(["failure"]):
                if time.monotonic() >= give_up:
                    return None
                time.sleep(0.02)
            return PeerError(store.get("failure").decode(errors="replace"))
        return None

    def _post(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._open_store().compare_set("failure", "", text)

    def _open_store(self) -> PrefixStore:
        """The store over a connection of our own: the user's thread may be waiting in the other one.

        Made when it is needed: that can take seconds, and most runs never fail.
        """
        store = PrefixStore(self._prefix, self._users_store.clone())
        store.set_timeout(_STORE_TIMEOUT)
        return store
