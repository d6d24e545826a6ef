"""Receives over Gloo, and those that are posted ahead of time on far links."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# A mailbox costs a copy of the message, which takes up to a millisecond, and saves half of a round trip.
_FAR_S = 0.002
# Larger messages take longer than the news that they are awaited.
_SMALL_BYTES = 4 << 20
# While one is emptied and posted again, the next message needs the other.
_NUM_MAILBOXES = 2
# The memory that a group may hold in mailboxes, and the number of sizes that it remembers.
_MOST_BYTES = 64 << 20
_MOST_SIZES = 1 << 14
# Tags are below 2^31, and the first two belong to no message. A small size has a tag of its own: a mailbox
# would not hold a message of another.
_FIRST_TAG, _LARGE_TAG = 2, 1 << 30


class Receive(Protocol):
    """A message on its way into a row."""

    def wait(self) -> object:
        """Return when the message is in its row."""
        ...


def looks_ahead(round_trip_s: float, num_bytes: float) -> bool:
    """Return True if messages of a size have mailboxes, on links with round trips of this time."""
    return round_trip_s > _FAR_S and num_bytes < _SMALL_BYTES


def tag_of(row: Tensor) -> int:
    """Return the tag of a message: its size.

    Gloo gives the messages of a tag to its receives one after the other. It ends the process when a message
    meets a receive of another size. With the size in the tag they do not meet, and the receive times out.
    """
    num_bytes = _num_bytes(row)
    return _FIRST_TAG + num_bytes if num_bytes < _SMALL_BYTES else _LARGE_TAG + num_bytes % _LARGE_TAG


def post_receive(connection: Any, peer: int, row: Tensor) -> dist.Work:
    """Begin to receive a message from ``peer`` into ``row``."""
    work: dist.Work = connection.recv([row], peer, tag_of(row))
    return work


class Mailboxes:
    """Memory of a group for messages that it does not wait for yet.

    Note [Receives ahead of time]: Gloo sends a message when it knows that it is awaited, and that news takes
    as long as a message. So a receive that is posted in time halves what a message costs. Steps are alike: a
    size that has come twice will come again. So its messages get two mailboxes, which are always posted,
    except while one is full. Two are enough: before a rank sends its next message, it waits for one of this
    rank's, and news of the other mailbox has come ahead of that.

    The sender need not know of mailboxes, since a tag is a size. A receive cannot be taken back: those of a
    size that never comes again wait, with their memory, until the group closes.
    """

    def __init__(self) -> None:
        self._posted: dict[tuple[int, int], deque[tuple[Tensor, dist.Work]]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._num_bytes = 0

    def receive(self, connection: Any, peer: int, row: Tensor) -> Receive:
        """Begin to receive a message from ``peer`` into ``row``: from its mailbox, if it has one."""
        key = peer, _num_bytes(row)
        if posted := self._posted.get(key):
            return _Letter(self, connection, peer, row, *posted.popleft())
        work = post_receive(connection, peer, row)
        if key not in self._posted and self._comes_again(key):
            self._open(connection, peer, _num_bytes(row))
        return work

    def post(self, connection: Any, peer: int, memory: Tensor) -> None:
        """Post a receive into ``memory``."""
        # If the peer has closed, its last messages may still count. Whoever needs another one gets the error.
        with contextlib.suppress(RuntimeError):
            work = post_receive(connection, peer, memory)
            self._posted.setdefault((peer, memory.numel()), deque()).append((memory, work))

    def clear(self) -> None:
        """Free the memory; no more messages may come."""
        self._posted.clear()

    def _comes_again(self, key: tuple[int, int]) -> bool:
        """Return True if a size has come before."""
        if key in self._seen:
            return True
        if len(self._seen) == _MOST_SIZES:
            self._seen.clear()
        self._seen.add(key)
        return False

    def _open(self, connection: Any, peer: int, num_bytes: int) -> None:
        """Post receives for messages of a size, if there is memory left."""
        added = _NUM_MAILBOXES * num_bytes
        if self._num_bytes + added <= _MOST_BYTES:
            self._num_bytes += added
            for _ in range(_NUM_MAILBOXES):
                self.post(connection, peer, torch.empty(num_bytes, dtype=torch.uint8))


class _Letter:
    """A message on its way into a mailbox, and from there into its row."""

    def __init__(
        self, owner: Mailboxes, connection: Any, peer: int, row: Tensor, memory: Tensor, work: dist.Work
    ) -> None:
        self._owner, self._connection, self._peer = owner, connection, peer
        self._row, self._memory, self._work = row, memory, work

    def wait(self) -> None:
        self._work.wait()
        self._row.view(torch.uint8).copy_(self._memory)
        self._owner.post(self._connection, self._peer, self._memory)


def _num_bytes(row: Tensor) -> int:
    return row.numel() * row.element_size()
