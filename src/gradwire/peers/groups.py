"""Groups of ranks, and rounds of messages: the one primitive that exchanges are written in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class Traffic:
    """The messages that a group has sent so far, and the time it has waited for them."""

    bytes_sent: int = 0
    num_messages: int = 0
    wait_s: float = 0.0

    def since(self, earlier: Traffic) -> Traffic:
        """Return the traffic after ``earlier``, which is a copy of this one from then."""
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
        """Return when all rows have been sent and have arrived."""
        ...


class Group(Protocol):
    """Ranks that exchange gradients. Every rank issues the same rounds in the same order."""

    rank: int
    size: int
    traffic: Traffic

    @property
    def names(self) -> Sequence[int]:
        """The ranks by which errors name its members: those of the world, where it is a part of that."""
        ...

    @property
    def native_sum(self) -> Callable[[Tensor], None] | None:
        """The backend's own sum over ranks, in place; None if rounds of messages are faster for fp32."""
        ...

    @property
    def native_scatter(self) -> Callable[[Tensor, Tensor], None] | None:
        """The backend's own reduce-scatter; as for `native_sum`, None if rounds of messages are faster.

        It sums ``values``, of equal chunks for all ranks, and leaves this rank's chunk in ``own``.
        """
        ...

    @property
    def native_gather(self) -> Callable[[Tensor, int], None] | None:
        """The backend's own gathering of rows; None if rounds of messages are faster.

        It gives every rank every rank's row of a matrix of bytes: this rank's is there, the others come in
        place. The second argument is the number of bytes that this rank's row holds. Rows are sent whole.
        """
        ...

    def post(self, rows: Sequence[Tensor]) -> Messages:
        """Begin a round that receives the row of rank r into ``rows[r]``; empty rows are not sent.

        To each rank, send the messages of rounds in the order in which the rounds began.
        """
        ...

    def close(self) -> None:
        """Close the group; ranks that wait for this one learn of it at once."""
        ...


class PeerUnreachable(Exception):
    """A peer could not be reached: it closed its group, died, or took longer than the timeout."""

    def __init__(
        self, peer: int | None, reason: str, *, connecting: bool = False, name: int | None = None
    ) -> None:
        """Say that ``peer`` sent no message, or could not be connected to; None if it is not known which.

        ``name`` is the rank that the text names, by default the peer's in the group.
        """
        whom = "another rank" if peer is None else f"rank {peer if name is None else name}"
        what = "could not connect to the other ranks" if connecting else f"no message from {whom}"
        super().__init__(f"{what}: {reason}")
        self.peer = peer


def gather(rows: Sequence[Tensor], group: Group) -> None:
    """Give every rank every rank's row: send ``rows[group.rank]``, and receive the others in place."""
    messages = group.post(rows)
    for distance in range(1, group.size):
        messages.send((group.rank + distance) % group.size, rows[group.rank])
    messages.finish()


def gather_matrix(matrix: Tensor, sizes: Sequence[int], group: Group) -> None:
    """Give every rank every rank's row of ``matrix``, of which the first ``sizes[r]`` bytes are used."""
    if group.native_gather is not None:
        group.native_gather(matrix, sizes[group.rank])
    else:
        gather([row[:size] for row, size in zip(matrix, sizes, strict=True)], group)


def gather_by_nodes(rows: Sequence[Tensor], group: Group, node_size: int) -> None:
    """Give every rank every rank's row as `gather` does, but send each row to another node only once.

    Ranks 0 to ``node_size - 1`` are the first node, and so on. A row goes to the ranks of the same place in
    the other nodes, and these pass it on within their nodes.
    """
    node, place = divmod(group.rank, node_size)
    across = range(place, group.size, node_size)
    gather([rows[rank] for rank in across], Subgroup(group, across))
    within = Subgroup(group, range(node * node_size, (node + 1) * node_size))
    for first in range(0, group.size if node_size > 1 else 0, node_size):
        gather(rows[first : first + node_size], within)


def gather_rows(own: Tensor, group: Group) -> Tensor:
    """Return every rank's ``own``, in rank order, as one tensor; all ranks give the same shape and dtype."""
    rows = own.new_zeros((group.size, *own.shape))
    rows[group.rank] = own
    if group.size > 1:
        gather(list(rows.view(group.size, own.numel()).view(torch.uint8)), group)
    return rows


class SingleRankGroup:
    """A group of this rank alone, for local work that must keep its place in a lane's order."""

    rank = 0
    size = 1
    names = (0,)
    native_sum = None
    native_scatter = None
    native_gather = None

    def __init__(self) -> None:
        self.traffic = Traffic()

    def post(self, rows: Sequence[Tensor]) -> Messages:
        raise AssertionError("there is nobody to send messages to")

    def close(self) -> None:
        """Do nothing: no rank waits for this one."""


class Subgroup:
    """Some ranks of a group, which exchange rows through that group.

    Every rank of the whole group belongs to one such subgroup, and all issue the same rounds.
    """

    native_sum = None
    native_scatter = None
    native_gather = None

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        """Take ``ranks`` of ``group``, in this order; this rank must be among them."""
        self.rank = ranks.index(group.rank)
        self.size = len(ranks)
        self.names = [group.names[rank] for rank in ranks]
        self.traffic = group.traffic
        self._group = group
        self._ranks = ranks

    def post(self, rows: Sequence[Tensor]) -> Messages:
        everyone = [rows[0][:0]] * self._group.size
        for rank, row in zip(self._ranks, rows, strict=True):
            everyone[rank] = row
        return _SubgroupMessages(self._group.post(everyone), self._ranks)

    def close(self) -> None:
        """Do nothing: the owner of the whole group closes it."""


class _SubgroupMessages:
    """One round of the whole group, with peers numbered as in the subgroup."""

    def __init__(self, messages: Messages, ranks: Sequence[int]) -> None:
        self._messages = messages
        self._ranks = ranks

    def send(self, peer: int, row: Tensor) -> None:
        self._messages.send(self._ranks[peer], row)

    def wait(self, peer: int) -> None:
        self._messages.wait(self._ranks[peer])

    def finish(self) -> None:
        self._messages.finish()
