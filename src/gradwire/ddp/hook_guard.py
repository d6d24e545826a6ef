"""The guard of a user's hook, which keeps failures and runs collective work beside the hook."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place, WireError, locate
from gradwire.lanes import CollectiveWork
from gradwire.peers import Group

Completion = concurrent.futures.Future[None]
"""Done when collective work has ended, with or without an error."""


class HookGuard(Protocol):
    """Keeps the first failure of a hook, and ends waits that would last for ever.

    `HookWatchdog` does so for hooks that wait for other ranks on the host, `NoWatchdog` for all others.
    """

    @property
    def failure(self) -> WireError | None: ...

    def watch(
        self, future: Future[Tensor], place: Place, give_up: Callable[[], None], finished: threading.Event
    ) -> None:
        """Call ``give_up`` if nobody will complete ``future``; ``finished`` is set after its callbacks."""
        ...

    def fail(self, error: WireError) -> None:
        """Keep ``error``, unless there is an earlier one."""
        ...

    def start_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> Completion:
        """Run ``work`` on every rank, after the work started before it; an error in it is a failure.

        ``device`` is that of the buckets.
        """
        ...

    def explained(self, error: WireError, place: Place, waited_s: float) -> WireError:
        """Return ``error`` with what is known of the other ranks, or the one of another rank behind it."""
        ...

    def close(self) -> None: ...


class NoWatchdog:
    """The guard of a hook whose futures nobody waits for on the host: failures stay on this rank."""

    def __init__(self, peers: Group | None = None) -> None:
        """Run collective work over ``peers``; None if there will be no such work."""
        self._peers = peers
        self._failure: WireError | None = None

    @property
    def failure(self) -> WireError | None:
        return self._failure

    def watch(
        self, future: Future[Tensor], place: Place, give_up: Callable[[], None], finished: threading.Event
    ) -> None:
        """Do nothing: the hook completes its future."""

    def fail(self, error: WireError) -> None:
        self._failure = self._failure or error

    def start_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> Completion:
        """Run ``work`` on the calling thread, with tensors on ``device``."""
        assert self._peers is not None, "a guard without peers runs no collective work"
        try:
            work(self._peers, device)
        except Exception as error:
            self.fail(locate(error, place))
        completion = Completion()
        completion.set_result(None)
        return completion

    def explained(self, error: WireError, place: Place, waited_s: float) -> WireError:
        """Return ``error``: nothing is known of the other ranks."""
        return error

    def close(self) -> None:
        """Do nothing: there is no thread to end."""
