"""Messages over the NCCL group of the user's model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from gradwire.peers.groups import Messages, PeerUnreachable, Traffic
from gradwire.peers.process_groups import all_gather_single, reduce_scatter_single, world_ranks


class NcclGroup:
    """The model's NCCL group. Every call is enqueued on the current CUDA stream; the host never waits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.names = world_ranks(group)
        self.traffic = Traffic()
        self.begin: Callable[[Callable[[], object]], None] | None = None
        """Begins messages, while they are recorded; None to begin them at once."""
        # Lanes are cached by process group: a strong reference from a lane would keep the group alive.
        self._group_ref = weakref.ref(group)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise PeerUnreachable(
                self.rank, "the process group has been destroyed", name=self.names[self.rank]
            )
        return group

    def post(self, rows: Sequence[Tensor]) -> Messages:
        return _NcclMessages(self, rows)

    def native_sum(self, tensor: Tensor) -> None:
        """Sum by NCCL's allreduce: not in rank order, but the same on every rank."""
        # The bytes of a ring. NCCL may choose a tree, which sends about as many.
        numel = 2 * (self.size - 1) * tensor.numel() // self.size
        self.traffic.bytes_sent += numel * tensor.element_size()
        self.traffic.num_messages += 2 * (self.size - 1)
        self.launch(lambda: dist.all_reduce(tensor, group=self._group))

    def native_scatter(self, values: Tensor, own: Tensor) -> None:
        """Sum by NCCL's reduce-scatter: not in rank order."""
        self.traffic.bytes_sent += (self.size - 1) * own.numel() * own.element_size()
        self.traffic.num_messages += self.size - 1
        self.launch(lambda: reduce_scatter_single(own, values, group=self._group))

    def native_gather(self, matrix: Tensor, num_bytes: int) -> None:
        """Gather by NCCL's all-gather, which uses more connections than messages from rank to rank."""
        own = matrix[self.rank]
        # What pads rows to one length, some bytes for each sum in them, is not counted.
        self.traffic.bytes_sent += (self.size - 1) * num_bytes
        self.traffic.num_messages += (self.size - 1) * int(num_bytes > 0)
        self.launch(lambda: all_gather_single(matrix.view(-1), own, group=self._group))

    def exchange(self, rows: list[Tensor], outgoing: list[Tensor]) -> None:
        """Send ``outgoing[r]`` to each rank r, and receive its row into ``rows[r]``."""
        # One grouped launch for all peers: NCCL builds its own all-to-all the same way.
        self.launch(lambda: dist.all_to_all(rows, outgoing, group=self._group))

    def launch(self, message: Callable[[], object]) -> None:
        """Begin a message, or let the recording begin it."""
        if self.begin is None:
            message()
        else:
            self.begin(message)

    def close(self) -> None:
        """Do nothing: the group belongs to the user."""


class _NcclMessages:
    """One round of messages, launched together at the first `wait`."""

    def __init__(self, owner: NcclGroup, rows: Sequence[Tensor]) -> None:
        self._owner = owner
        nothing = rows[0][:0]
        self._rows = [nothing if peer == owner.rank else row for peer, row in enumerate(rows)]
        self._outgoing = [nothing] * owner.size
        self._launched = False

    def send(self, peer: int, row: Tensor) -> None:
        self._outgoing[peer] = row
        self._owner.traffic.bytes_sent += row.numel() * row.element_size()
        self._owner.traffic.num_messages += int(row.numel() > 0)

    def wait(self, peer: int) -> None:
        if not self._launched:
            self._owner.exchange(self._rows, self._outgoing)
            self._launched = True

    def finish(self) -> None:
        self.wait(0)
