"""Point-to-point messages over Gloo groups of our own."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from gradwire.peers.groups import ClosedGroup, Messages, Traffic
from gradwire.peers.process_groups import timeout_of

# Two tags that no message carries: see `GlooGroup.close` and `GlooGroup.watch`.
_CLOSING_TAG = 0
_WATCHING_TAG = 1
_NUM_ROUNDS = 1 << 15


def open_gloo(group: dist.ProcessGroup, prefix: str, *, late: bool = False) -> GlooGroup:
    """A Gloo group of our own, with the ranks and the timeout of ``group``; collective, or its `open` is."""
    store: Any = group.get_group_store()
    if late and isinstance(getattr(store, "_underlying_non_prefix_store", None), TCPStore):
        store = store.clone()
    return GlooGroup(store, prefix, group.rank(), group.size(), timeout_of(group), late=late)


class GlooGroup:
    """A Gloo group of our own, unknown to torch's registry, so nothing else can interleave with it.

    Rows go by point-to-point messages, receives posted before sends: on a rate-limited link that holds
    96 to 100 % of the rate at every size, where Gloo's own all-to-all falls to 60 % and its all-gather
    runs at a tenth of the loopback.

    Between two ranks there is a connection for each way. In one for both, Gloo's thread can neither read nor
    sleep while another thread writes to it, and what says that a receive is posted queues behind the bytes
    that go the same way: on loopback that took 1.2 times as long.
    """

    native_sum = None

    def __init__(
        self, store: Store, prefix: str, rank: int, size: int, timeout: timedelta, *, late: bool = False
    ) -> None:
        """Connect to the other ranks, or leave that to `open` if ``late``.

        Collective; raises RuntimeError when they cannot be reached. A late group needs a ``store`` of its
        own: who waits in one keeps all others out of it.
        """
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.waits_for: int | None = None
        """The rank whose message this one is waiting for, if it is waiting."""
        self._round = 0
        self._ways: tuple[Any, ...] = ()
        self._is_closed, self._closing = False, threading.Lock()
        self._connect = functools.partial(_connect, store, prefix, rank, size, timeout)
        self._is_late = late
        if not late:
            self._ways = self._connect()

    def open(self) -> None:
        """Connect, if that was left for later; after `close` too, for others wait for this rank."""
        if self._is_late:
            ways = self._connect()
            with self._closing:
                self._ways, self._is_late = ways, False
            if self._is_closed:
                self.close()

    def way(self, sender: int, receiver: int) -> Any:
        """The connections by which one rank sends to another."""
        if not self._ways:
            raise ClosedGroup(self.rank, "this rank has closed the group")
        return self._ways[sender < receiver]

    def post(self, rows: Sequence[Tensor]) -> Messages:
        self._round = self._round % (_NUM_ROUNDS - 1) + 1
        return _GlooMessages(self, self._round, rows)

    def watch(self, peer: int) -> None:
        """Block until ``peer`` closes the group or dies; nothing is ever sent for it."""
        with _closing(peer):
            # For as long as the run lasts, whatever the group's own timeout is.
            way = self.way(peer, self.rank)
            way.recv([torch.zeros(1)], peer, _WATCHING_TAG).wait(timedelta(days=365))

    def close(self) -> None:
        with self._closing:
            ways, self._ways, self._is_closed = self._ways, (), True
        if self.size == 1:
            return
        # Neither abort() nor shutdown() frees a thread that waits in this group. A receive that times
        # out does: it closes every connection of this group, and of this group only.
        for way in ways:
            with contextlib.suppress(RuntimeError):
                way.recv([torch.zeros(1)], (self.rank + 1) % self.size, _CLOSING_TAG).wait(
                    timedelta(milliseconds=1)
                )


def _connect(store: Store, prefix: str, rank: int, size: int, timeout: timedelta) -> tuple[Any, ...]:
    """What goes to lower ranks and what goes to higher, by one device and so one thread."""
    try:  # torch's stubs leave out most of this class
        down: Any = ProcessGroupGloo(PrefixStore(f"{prefix}/down", store), rank, size, timeout)
        up: Any = ProcessGroupGloo(PrefixStore(f"{prefix}/up", store), rank, size, down.options)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: gradwire could not connect to the other ranks of the group: {error}"
        ) from error
    return down, up


class _GlooMessages:
    def __init__(self, owner: GlooGroup, number: int, rows: Sequence[Tensor]) -> None:
        self._owner = owner
        self._number = number
        self._receives: dict[int, dist.Work] = {}
        self._sends: dict[int, dist.Work] = {}
        for peer, row in enumerate(rows):
            if peer != owner.rank and row.numel():
                with _closing(peer):
                    way = owner.way(peer, owner.rank)
                    self._receives[peer] = way.recv([row], peer, _tag(number, row))

    def send(self, peer: int, row: Tensor) -> None:
        if row.numel() == 0:
            return
        with _closing(peer):
            way = self._owner.way(self._owner.rank, peer)
            self._sends[peer] = way.send([row], peer, _tag(self._number, row))
        self._owner.traffic.bytes_sent += row.numel() * row.element_size()
        self._owner.traffic.num_messages += 1

    def wait(self, peer: int) -> None:
        self._wait(self._receives, peer)

    def finish(self) -> None:
        for works in (self._receives, self._sends):
            for peer in list(works):
                self._wait(works, peer)

    def _wait(self, works: dict[int, dist.Work], peer: int) -> None:
        work = works.pop(peer, None)
        if work is None:
            return
        begin, self._owner.waits_for = time.perf_counter(), peer
        with _closing(peer):
            work.wait()
        self._owner.waits_for = None
        self._owner.traffic.wait_s += time.perf_counter() - begin


@contextlib.contextmanager
def _closing(peer: int) -> Iterator[None]:
    """Make Gloo's error, which any call on a closed connection raises, one about ``peer``."""
    try:
        yield
    except RuntimeError as error:
        # "[file.cc:553] Connection closed by peer [127.0.0.1]:80. This is typically caused by ..."
        reason = re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition(". This is typically")[0]
        raise ClosedGroup(peer, reason) from error


def _tag(number: int, row: Tensor) -> int:
    """The tag of one message of a round, its size included.

    Gloo ends the process when a message meets a receive of another size; a message that nobody expects is
    an error after the timeout.
    """
    return number << 16 | row.numel() * row.element_size() % 65521
