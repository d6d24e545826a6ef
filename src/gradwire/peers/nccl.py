"""Messages over the NCCL group of the user's model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.peers.groups import Messages, PeerUnreachable, Traffic
from gradwire.peers.process_groups import world_ranks

# torch 2.13 has renamed it.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclGroup:
    """The model's NCCL group. Every call is enqueued on the current CUDA stream; the host never waits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.names = world_ranks(group)
        self.traffic = Traffic()
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
        return _NcclMessages(self, self._group, rows)

    def native_sum(self, tensor: Tensor) -> None:
        """Sum by NCCL's allreduce: not in rank order, but the same on every rank."""
        # The bytes of a ring. NCCL may choose a tree, which sends about as many.
        numel = 2 * (self.size - 1) * tensor.numel() // self.size
        self.traffic.bytes_sent += numel * tensor.element_size()
        self.traffic.num_messages += 2 * (self.size - 1)
        dist.all_reduce(tensor, group=self._group)

    def native_scatter(self, values: Tensor, own: Tensor) -> None:
        """Sum by NCCL's reduce-scatter: not in rank order."""
        self.traffic.bytes_sent += (self.size - 1) * own.numel() * own.element_size()
        self.traffic.num_messages += self.size - 1
        _reduce_scatter(own, values, group=self._group)

    def close(self) -> None:
        """Do nothing: the group belongs to the user."""


class _NcclMessages:
    """One round of messages, launched together at the first `wait`."""

    def __init__(self, owner: NcclGroup, group: dist.ProcessGroup, rows: Sequence[Tensor]) -> None:
        self._owner = owner
        self._group = group
        nothing = rows[0][:0]
        self._rows = [nothing if peer == owner.rank else row for peer, row in enumerate(rows)]
        self._outgoing = [nothing] * owner.size
        self._launched = False

    def send(self, peer: int, row: Tensor) -> None:
        self._outgoing[peer] = row
        self._owner.traffic.bytes_sent += row.numel() * row.element_size()
        self._owner.traffic.num_messages += int(row.numel() > 0)

    def wait(self, peer: int) -> None:
        # One grouped launch for all peers: NCCL builds its own all-to-all the same way.
        if not self._launched:
            dist.all_to_all(self._rows, self._outgoing, group=self._group)
            self._launched = True

    def finish(self) -> None:
        self.wait(0)
