"""Ranks that are threads of this process. One of them runs at a time."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.peers import Group, Messages, PeerUnreachable, Traffic
from gradwire.ranks import RanksFailed

T = TypeVar("T")


def run_virtual_ranks(fn: Callable[[Group], T], world_size: int) -> list[T]:
    """Run ``fn(group)`` on ranks that are threads of this process, and return what each returns.

    Args:
        fn: any callable. Exchanges take the ``group`` as they take a real one, and end with the same bits. On
            CUDA all ranks use the current stream of the caller.
        world_size: number of ranks. A rank runs until it has to wait for another. So one core is enough, and
            the order in which ranks run is always the same.

    Raises `RanksFailed` when a rank raises, or when every rank waits for another.

    >>> from gradwire.peers import gather
    >>> def everyone(group):
    ...     rows = [torch.full((1,), group.rank) for _ in range(group.size)]
    ...     gather(rows, group)
    ...     return torch.cat(rows).tolist()
    >>> run_virtual_ranks(everyone, world_size=3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    shared = _Mailbox(world_size)
    results: dict[int, T] = {}
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def serve(rank: int) -> None:
        shared.turns[rank].acquire()
        try:
            # Grad mode and stream are per thread.
            with torch.no_grad(), torch.cuda.stream(stream):
                results[rank] = fn(VirtualGroup(shared, rank))
        except BaseException as error:
            shared.fail(rank, error)
        finally:
            shared.leave(rank)

    threads = [
        threading.Thread(target=serve, args=(rank,), name=f"virtual-rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    shared.turns[0].release()
    for thread in threads:
        thread.join()
    if shared.failure is not None:
        rank, error = shared.failure
        text = "".join(traceback.format_exception(error))
        raise RanksFailed(f"a virtual rank failed\n\nrank {rank}: {text}", {rank: text}) from error
    return [results[rank] for rank in range(world_size)]


class VirtualGroup:
    """One rank's side of a group whose ranks take turns."""

    native_sum = None
    native_scatter = None
    native_gather = None

    def __init__(self, shared: _Mailbox, rank: int) -> None:
        self.rank = rank
        self.size = shared.size
        self.names = range(shared.size)
        self.traffic = Traffic()
        self.last_sent: dict[int, int] = {}
        """The number of the last round that was sent to each rank."""
        self._shared = shared
        self._round = 0

    def post(self, rows: Sequence[Tensor]) -> Messages:
        self._round += 1
        return _VirtualMessages(self, self._shared, self._round, rows)

    def close(self) -> None:
        """Do nothing: all ranks know of one that ends or fails."""


class _VirtualMessages:
    def __init__(self, owner: VirtualGroup, shared: _Mailbox, number: int, rows: Sequence[Tensor]) -> None:
        self._owner = owner
        self._shared = shared
        self._number = number
        peers = [peer for peer in range(owner.size) if peer != owner.rank]
        self._receives = {(peer, owner.rank, number) for peer in peers if rows[peer].numel()}
        self._sends: set[_Key] = set()
        for key in self._receives:
            shared.receive(key, rows[key[0]])

    def send(self, peer: int, row: Tensor) -> None:
        if row.numel() == 0:
            return
        assert self._number > self._owner.last_sent.get(peer, 0), "a later round has already been sent"
        self._owner.last_sent[peer] = self._number
        key = (self._owner.rank, peer, self._number)
        self._sends.add(key)
        self._shared.send(key, row)
        self._owner.traffic.bytes_sent += row.numel() * row.element_size()
        self._owner.traffic.num_messages += 1

    def wait(self, peer: int) -> None:
        key = (peer, self._owner.rank, self._number)
        if key in self._receives:
            self._shared.wait(key, self._owner.rank, peer)
            self._receives.remove(key)

    def finish(self) -> None:
        for key in sorted(self._receives):
            self.wait(key[0])
        for key in sorted(self._sends):
            self._shared.wait(key, self._owner.rank, key[1])
        self._sends.clear()


_Key = tuple[int, int, int]  # sender, receiver, number of the round


class _Mailbox:
    """The messages of all ranks, and the turns they take. Only the rank whose turn it is touches it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.failure: tuple[int, BaseException] | None = None
        self._present = list(range(size))
        self._sent: dict[_Key, Tensor] = {}
        self._awaited: dict[_Key, Tensor] = {}
        # Turns since the last message. When every rank has had one, none can go on.
        self._num_idle_turns = 0

    def send(self, key: _Key, row: Tensor) -> None:
        self._num_idle_turns = 0
        target = self._awaited.pop(key, None)
        if target is None:
            self._sent[key] = row
        else:
            target.copy_(row)

    def receive(self, key: _Key, row: Tensor) -> None:
        self._num_idle_turns = 0
        source = self._sent.pop(key, None)
        if source is None:
            self._awaited[key] = row
        else:
            row.copy_(source)

    def wait(self, key: _Key, rank: int, peer: int) -> None:
        """Let other ranks run until this message has been received."""
        while key in self._sent or key in self._awaited:
            if self.failure is not None:
                raise PeerUnreachable(peer, f"rank {self.failure[0]} has failed")
            if self._num_idle_turns > len(self._present):
                raise PeerUnreachable(peer, "every rank that is still there waits for another")
            self._num_idle_turns += 1
            following = self._next(rank)
            if following != rank:
                self.turns[following].release()
                self.turns[rank].acquire()

    def fail(self, rank: int, error: BaseException) -> None:
        self.failure = self.failure or (rank, error)

    def leave(self, rank: int) -> None:
        following = self._next(rank)
        self._present.remove(rank)
        if following != rank:
            self.turns[following].release()

    def _next(self, rank: int) -> int:
        return self._present[(self._present.index(rank) + 1) % len(self._present)]
