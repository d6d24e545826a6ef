"""The first failure of a wire, readable by every rank through the group's store."""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

# A rank posts its text before it closes its connections, so whoever sees them closed finds the text at
# once; a rank that was killed posts nothing, and this is how long others look for it.
_PATIENCE_S = 0.5


class Board:
    """A place in the store where the first rank that fails leaves its text for the others."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = PrefixStore(prefix, store)
        self._store.set_timeout(timedelta(seconds=5))

    def post(self, text: str) -> str:
        """Leave ``text`` unless another rank was first; return what the board then says."""
        try:
            return self._store.compare_set("failure", "", text).decode(errors="replace")
        except RuntimeError:  # the store went down with the rank that hosts it
            return text

    def read(self) -> str | None:
        """The text some rank has left, or None when there is none for a while."""
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            try:
                if self._store.check(["failure"]):
                    return self._store.get("failure").decode(errors="replace")
            except RuntimeError:
                return None
            if time.monotonic() >= give_up:
                return None
            time.sleep(0.02)
