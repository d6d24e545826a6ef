"""Groups of ranks, and the one primitive that exchanges are written in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class Traffic:
    """What a group has sent so far, and how long it waited for it."""

    bytes_sent: int = 0
    num_messages: int = 0
    wait_s: float = 0.0

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent - earlier.bytes_sent,
            self.num_messages - earlier.num_messages,
            self.wait_s - earlier.wait_s,
        )

    def copy(self) -> Traffic:
        return Traffic(self.bytes_sent, self.num_messages, self.wait_s)


class Messages(Protocol):
    """One round of messages among all ranks: at most one from each rank to each other rank."""

    def send(self, peer: int, row: Tensor) -> None:
        """Send ``row`` to ``peer``; the row must not change before `finish`."""
        ...

    def wait(self, peer: int) -> None:
        """Return when the row from ``peer`` has arrived; call it after the last `send`."""
        ...

    def finish(self) -> None:
        """Return when everything has been sent and has arrived."""
        ...


class Group(Protocol):
    """Ranks that exchange gradients. Every rank issues the same rounds in the same order."""

    rank: int
    size: int
    traffic: Traffic

    @property
    def native_sum(self) -> Callable[[Tensor], None] | None:
        """The backend's own sum over ranks, in place, if that is the fastest for fp32."""
        ...

    def post(self, rows: Sequence[Tensor]) -> Messages:
        """Open a round: ``rows[r]`` is where the row from rank r goes; empty rows are not sent."""
        ...

    def close(self) -> None:
        """Give the group up; ranks that wait for this one learn of it at once."""
        ...


def gather(rows: Sequence[Tensor], group: Group) -> None:
    """Give every rank every rank's own row: ``rows[r]`` becomes that of rank r."""
    messages = group.post(rows)
    for distance in range(1, group.size):
        messages.send((group.rank + distance) % group.size, rows[group.rank])
    messages.finish()


class Subgroup:
    """Some ranks of a group, who exchange rows by way of it.

    Every rank of the whole group belongs to some subgroup of the same kind, and all issue the same rounds.
    """

    native_sum = None

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        """The ``ranks`` of ``group``, this one among them, in order."""
        self.rank = ranks.index(group.rank)
        self.size = len(ranks)
        self.traffic = group.traffic
        self._group = group
        self._ranks = ranks

    def post(self, rows: Sequence[Tensor]) -> Messages:
        everyone = [rows[0][:0]] * self._group.size
        for rank, row in zip(self._ranks, rows, strict=True):
            everyone[rank] = row
        return _SubgroupMessages(self._group.post(everyone), self._ranks)

    def close(self) -> None:
        """Nothing to do: the group is another's."""


class _SubgroupMessages:
    def __init__(self, messages: Messages, ranks: Sequence[int]) -> None:
        self._messages = messages
        self._ranks = ranks

    def send(self, peer: int, row: Tensor) -> None:
        self._messages.send(self._ranks[peer], row)

    def wait(self, peer: int) -> None:
        self._messages.wait(self._ranks[peer])

    def finish(self) -> None:
        self._messages.finish()


class ClosedGroup(Exception):
    """A peer could not be reached: it closed, died or took longer than the timeout."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"no message from rank {peer}: {reason}")
        self.peer = peer


class Alone:
    """A group of this rank alone, for work that is local but must keep its place in a lane's order."""

    rank = 0
    size = 1
    native_sum = None

    def __init__(self) -> None:
        self.traffic = Traffic()

    def post(self, rows: Sequence[Tensor]) -> Messages:
        raise AssertionError("there is nobody to send messages to")

    def close(self) -> None:
        """Nothing to do: nobody waits for this rank."""
