"""Connections of several Gloo groups, made side by side, with one exchange of addresses for all of them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from gradwire.peers.distance import round_trip_s
from gradwire.peers.store_connections import LimitedStore
from gradwire.torch_private import HashStore, PrefixStore, ProcessGroupGloo, Store

Connections = tuple[Any, Any]
"""A process group for sends to lower ranks and one for sends to higher ranks."""


def connect_all(
    store: LimitedStore,
    prefixes: Sequence[str],
    rank: int,
    names: Sequence[int],
    timeout: timedelta,
) -> tuple[list[Connections], float]:
    """Make the connections of a group for each prefix; collective.

    Return them with the longest round trip, in seconds, from any rank to the store.

    The two process groups of a prefix share one Gloo device, and so one thread. ``names`` has the ranks that
    errors name, in rank order. Raises RuntimeError if a rank cannot be reached.
    """
    ways = [f"{prefix}/{way}" for prefix in prefixes for way in ("down", "up")]
    options = [each for _ in prefixes for each in 2 * [_options(timeout)]]
    book = _AddressBook(len(ways))
    made: dict[str, Any] = {}
    threads: list[threading.Thread] = []

    def connect(name: str, option: Any) -> None:
        try:
            made[name] = ProcessGroupGloo(PrefixStore(name, book), rank, len(names), option)
        except BaseException as error:
            book.fail(error)
        finally:
            book.leave()

    try:
        for args in zip(ways, options, strict=True):
            thread = threading.Thread(target=connect, args=args, name="gradwire-connect", daemon=True)
            thread.start()
            threads.append(thread)
        trip_s = _trade(book, store, f"{prefixes[0]}/addresses", rank, names, timeout)
    except BaseException as error:  # also KeyboardInterrupt: no thread may wait for ever
        book.fail(error)
    for thread in threads:
        thread.join()
    if book.error is None:
        # A rank that closes its connections at once must not do so while others still make theirs.
        try:
            made[ways[0]].barrier().wait()
        except BaseException as error:
            book.fail(error)
    if book.error is not None:
        # Closes connections, which frees the ranks at their other ends. The error's traceback has this frame.
        made.clear()
        raise book.error
    pairs = zip(ways[::2], ways[1::2], strict=True)
    return [(made[down], made[up]) for down, up in pairs], trip_s


class _AddressBook(Store):
    """A store in memory, in which the process groups of one rank find all addresses.

    Gloo asks a store three questions about each rank, one after the other, for each group. Over a far link,
    and with many ranks, the answers take longer than anything else in an attach. Here groups wait until the
    addresses of all groups have travelled together.
    """

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._entries: dict[str, bytes] = {}
        self._num_busy = num_groups
        self._is_complete = False
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # as torch calls it
        with self._changed:
            self._entries[key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there: at once, or when the addresses of all ranks are."""
        if self.check(keys):
            return
        self.leave()
        with self._changed:
            self._changed.wait_for(lambda: self._is_complete or self.error is not None)
        if not self.check(keys):
            raise self.error or RuntimeError(f"no rank has told the address {keys}")

    def leave(self) -> None:
        """Note that a group has told all its addresses: it asks for others, or is done."""
        with self._changed:
            self._num_busy -= 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End all waiting with the first error."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def own_entries(self) -> dict[str, bytes]:
        """Wait until all groups have told their addresses, and return them."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_busy <= 0 or self.error is not None)
            return dict(self._entries)

    def complete(self, entries: dict[str, bytes]) -> None:
        """Add the addresses of the other ranks."""
        with self._changed:
            self._entries |= entries
            self._is_complete = True
            self._changed.notify_all()


def _trade(
    book: _AddressBook,
    store: LimitedStore,
    prefix: str,
    rank: int,
    names: Sequence[int],
    timeout: timedelta,
) -> float:
    """Exchange the addresses of all ranks' groups over ``store``; return its longest round trip.

    Raises RuntimeError if a rank has none: the others must not try to reach it.
    """
    own = {key: base64.b64encode(value).decode() for key, value in book.own_entries().items()}
    keys = [f"{prefix}/{peer}" for peer in range(len(names))]
    error = None if book.error is None else str(book.error)
    store.set(keys[rank], json.dumps([round_trip_s(store), own, error]))
    if book.error is not None:
        raise book.error
    store.wait(keys, timeout)
    trips_s, entries, errors = zip(*map(json.loads, store.multi_get(keys)), strict=True)
    for name, text in zip(names, errors, strict=True):
        if text is not None:
            raise RuntimeError(f"rank {name}: {text}")
    book.complete({key: base64.b64decode(value) for each in entries for key, value in each.items()})
    longest: float = max(trips_s)
    return longest


def _options(timeout: timedelta) -> Any:
    """Return options with a new Gloo device, on the interface that torch chooses."""
    # A group of this rank alone has them. torch's stubs leave out most of this class.
    alone: Any = ProcessGroupGloo(HashStore(), 0, 1, timeout)
    return alone.options
