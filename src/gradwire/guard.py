"""Ends the waiting for a user's hook when a peer has failed, died or never answers.

Our own exchanges wait in groups of their own and learn of a failure when those close. A user's hook waits
in a group that we must not touch. So the ranks of a wire that runs such a hook also form a ring in which
nothing is ever sent: each waits for its successor, and when that one closes, closes too. A failure goes
round the ring in milliseconds, and costs nothing until then.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.board import Board
from gradwire.errors import PeerError, Place, WireError
from gradwire.execution import timeout_of
from gradwire.transport import ClosedGroup, GlooGroup, store_of

# A peer that ends normally closes the ring as well; its last messages may still be on their way.
_GRACE_S = 3.0


class Guard:
    """Completes futures that would otherwise never be completed, and keeps the first failure."""

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._core = _Core(group, prefix)
        for target in (self._core.watch_ring, self._core.watch_clock):
            threading.Thread(target=target, name=f"gradwire-{prefix}", daemon=True).start()
        self._finalizer = weakref.finalize(self, self._core.close)

    @property
    def failure(self) -> WireError | None:
        return self._core.failure

    def watch(self, future: Future[Tensor], place: Place, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` if ``future`` is not done when the ring breaks or the time is up."""
        self._core.add(future, place, give_up)

    def fail(self, error: WireError) -> WireError:
        """Give up on every rank; returns the first error of all."""
        return self._core.fail(error)

    def close(self) -> None:
        self._finalizer()


class _Core:
    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self.failure: WireError | None = None
        self._board = Board(store_of(group), prefix)
        self._timeout_s = timeout_of(group).total_seconds()
        # The ring waits for as long as the run lasts.
        self._ring = GlooGroup(store_of(group), prefix, group.rank(), group.size(), timedelta(days=365))
        self._changed = threading.Condition()
        self._pending: dict[Future[Tensor], tuple[float, Place, Callable[[], None]]] = {}
        self._broken = self._closed = False

    def add(self, future: Future[Tensor], place: Place, give_up: Callable[[], None]) -> None:
        with self._changed:
            patience = _GRACE_S if self._broken else self._timeout_s
            self._pending[future] = time.monotonic() + patience, place, give_up
            self._changed.notify()
        future.add_done_callback(self._remove)

    def _remove(self, future: Future[Tensor]) -> None:
        with self._changed:
            self._pending.pop(future, None)

    def fail(self, error: WireError) -> WireError:
        with self._changed:
            if self.failure is None:
                first = self._board.post(str(error))
                self.failure = error if first == str(error) else PeerError(first)
            self._give_up_all()
        self._ring.close()
        return self.failure

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._ring.close()

    def watch_ring(self) -> None:
        if self._ring.size == 1:
            return
        with contextlib.suppress(ClosedGroup):
            self._ring.watch((self._ring.rank + 1) % self._ring.size)
        text = None if self._closed or self.failure else self._board.read()
        with self._changed:
            self._broken = True
            if text is not None and self.failure is None:
                self.failure = PeerError(text)
                self._give_up_all()
            soon = time.monotonic() + _GRACE_S
            self._pending = {
                future: (min(deadline, soon), place, give_up)
                for future, (deadline, place, give_up) in self._pending.items()
            }
            self._changed.notify()
        self._ring.close()

    def watch_clock(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                deadline = min((entry[0] for entry in self._pending.values()), default=None)
                if deadline is None or deadline > time.monotonic():
                    self._changed.wait(None if deadline is None else deadline - time.monotonic())
                    continue
                place = next(entry[1] for entry in self._pending.values() if entry[0] == deadline)
            reason = (
                "a peer left or died while this rank waited for it"
                if self._broken
                else f"the hook's future was not completed within {self._timeout_s:g} s"
            )
            self.fail(WireError(f"{place}: {reason}"))

    def _give_up_all(self) -> None:
        for _, _, give_up in list(self._pending.values()):
            give_up()
        self._pending.clear()
