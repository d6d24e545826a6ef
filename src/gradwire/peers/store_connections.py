"""Requests to a group's store that keep nobody waiting when its host is dead or stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from gradwire.peers.process_groups import own_world_rank
from gradwire.torch_private import Store, has_tcp_store, own_connection, store_of

T = TypeVar("T")

STORE_IS_SILENT = (
    "The group's store does not answer, so the other ranks cannot be asked. It lives with rank 0 if "
    "init_process_group has made it: then that is the rank that died or is stopped"
)
# A store answers in milliseconds, unless its host is gone or very busy.
_GRACE = timedelta(seconds=15)


class StoreIsSilent(RuntimeError):
    """The error of a request that a group's store has not answered."""


class LimitedStore:
    """A group's store whose requests raise `StoreIsSilent` if its host is dead, or stopped for too long.

    A store's own timeout does not help when its host is stopped: a request then waits for ever, in a system
    call. So each request has a thread of its own.
    """

    def __init__(self, store: Store, rank: int, timeout: timedelta) -> None:
        """Ask ``store``; a request that may wait for other ranks waits no longer than ``timeout``.

        ``rank`` is the one that errors name.
        """
        self._store, self._rank, self._timeout = store, rank, timeout

    def add(self, key: str, amount: int) -> int:
        return self.answer(lambda: self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return self.answer(lambda: self._store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.answer(lambda: self._store.compare_set(key, expected, desired))

    def get(self, key: str) -> bytes:
        return self.answer(lambda: self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.answer(lambda: self._store.multi_get(list(keys)))

    def set(self, key: str, value: str) -> None:
        self.answer(lambda: self._store.set(key, value))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self.answer(lambda: self._store.wait(list(keys), timeout))

    def answer(self, request: Callable[[], T]) -> T:
        """Return what ``request``, which asks this store, returns."""
        if not has_tcp_store(self._store):  # others have no host
            return request()
        try:
            return begin(request).result((self._timeout + _GRACE).total_seconds())
        except dist.DistNetworkError as error:
            raise StoreIsSilent(f"rank {self._rank}: {error}. {STORE_IS_SILENT}") from error
        except TimedOut:
            raise StoreIsSilent(f"rank {self._rank}: {STORE_IS_SILENT}") from None


def limited_store(group: dist.ProcessGroup, timeout: timedelta) -> LimitedStore:
    """Return the store in which the ranks of ``group`` meet."""
    return LimitedStore(store_of(group), own_world_rank(group), timeout)


def begin(request: Callable[[], T]) -> Future[T]:
    """Run ``request``, such as one to a store, on a thread that never keeps Python from ending.

    Raises RuntimeError from Python 3.12 on, if the interpreter is ending.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            result = request()
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    threading.Thread(target=ask, name="gradwire-store", daemon=True).start()
    return answer


def own_store(group: dist.ProcessGroup, timeout: timedelta) -> Store:
    """Return a connection of its own to a group's store, if it has connections; may raise StoreIsSilent."""
    store: Store = store_of(group)
    if not has_tcp_store(store):
        return store
    connected: Store = limited_store(group, timeout).answer(lambda: own_connection(store, group.group_name))
    return connected
