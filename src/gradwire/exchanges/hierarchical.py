"""Averaging in two levels: within nodes, then between them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout, as_real
from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.links import Links
from gradwire.exchanges.one_shot import average_bytes, num_rounds
from gradwire.exchanges.residuals import migrate_residuals
from gradwire.exchanges.rounds import Rounds
from gradwire.exchanges.rows_and_columns import places_in_message, sum_over_grid
from gradwire.exchanges.scatter import Sum, bounds_of
from gradwire.exchanges.two_phase import TwoPhaseReduce, average_alone, two_shot_bytes
from gradwire.exchanges.two_shot import TwoShot
from gradwire.exchanges.unused import keep_unused_residuals
from gradwire.ops import Family
from gradwire.peers import Subgroup


@dataclass(frozen=True)
class Hierarchical:
    """Sum within each node, average between nodes, then gather within each node.

    Ranks 0 to ``local_size - 1`` are the first node, the next ``local_size`` ranks the second, and so on.

    1. Rank i of a node sums the i-th part of the bucket over its node, uncompressed.
    2. The i-th ranks of all nodes average that part by ``between``.
    3. The ranks of each node send each other their parts.

    So a node sends through its network card what one rank would send, not ``local_size`` times as much. All
    ranks end with the same bits. With ``encodes_within``, messages within a node are encoded too. Then a
    "node" may be any ``local_size`` ranks: of many ranks, each has few others to exchange messages with.
    """

    between: TwoShot
    local_size: int
    encodes_within: bool = False

    communicates = True
    sees_parameters = False
    starts = (0,)

    @property
    def kernels(self) -> frozenset[Family]:
        return self.between.kernels | Raw.kernels

    def __post_init__(self) -> None:
        if self.local_size < 2:
            raise ValueError(f"local_size must be at least 2 ranks, not {self.local_size}")

    @property
    def codec(self) -> Codec:
        """The encoding of messages between nodes."""
        return self.between.codec

    @property
    def feedback(self) -> torch.dtype | None:
        """The dtype of residuals; None if the exchange keeps none."""
        return self.between.feedback

    @property
    def momentum(self) -> float:
        """The momentum that ranks apply before they send."""
        return self.between.momentum

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        is_exact = self._num_nodes(context.group.size) == 1 and not self.encodes_within
        flat = as_real(flat)
        yield from migrate_residuals(flat, context, self.feedback, momentum=self.momentum)
        residual = self.between.residual(flat, context)
        values = context.scratch.converted("node", flat, self._node_dtype(flat.dtype))
        mask = yield from self.between.unused_mask(values, context)
        momentum = self.between.momentum_applied(values, mask, context, is_exact=is_exact)
        with momentum, keep_unused_residuals(mask, values, residual):
            self._average(values, residual, context)
        if values is not flat:
            flat.copy_(values)

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        return 0  # its messages go to subgroups, which other buckets do not use

    def repeats_as(self, step: int) -> Hashable | None:
        return None

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        num_nodes, (numel, dtype) = self._num_nodes(world_size), layout.real_values
        wide = self._node_dtype(dtype)
        codec, parts = self.codec.resolve(wide), bounds_of(numel, self.local_size)
        within = two_shot_bytes(Raw(wide), numel, self.local_size)
        if self.encodes_within and num_nodes == 1:
            within = average_bytes([(codec, numel)], self.local_size)
        elif self.encodes_within and not codec.in_place:
            within = _encoded_bytes(codec, [end - start for start, end in parts], num_nodes)
        if self.encodes_within:
            across = [two_shot_bytes(codec, end - start, num_nodes) for start, end in parts]
        else:
            across = [average_bytes([(codec, end - start)], num_nodes) for start, end in parts]
        ranks = [divmod(rank, self.local_size) for rank in range(world_size)]
        return [Links(within[index], across[index][node]) for node, index in ranks]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        num_nodes = self._num_nodes(world_size)
        codec = self.codec.resolve(self._node_dtype(layout.real_values[1]))
        if num_nodes == 1:
            return Links(num_rounds([codec], self.local_size) if self.encodes_within else 2, 0)
        return Links(2, 2 if self.encodes_within else num_rounds([codec], num_nodes))

    def _average(self, values: Tensor, residual: Tensor | None, context: Context) -> None:
        group = context.group
        node, index = divmod(group.rank, self.local_size)
        within = Subgroup(group, range(node * self.local_size, (node + 1) * self.local_size))
        across = Subgroup(group, range(index, group.size, self.local_size))
        if self.encodes_within and across.size == 1:
            self.between.average(values, residual, replace(context, group=within))
            return
        if self.encodes_within and not self.codec.resolve(values.dtype).in_place:
            sum_over_grid(self.between.sum_of(values, residual, context), context, within, across)
            return
        node_reduce = TwoPhaseReduce([Sum(values)], replace(context, group=within, scale=1.0))
        node_reduce.scatter_reduce()
        start, end = bounds_of(values.numel(), self.local_size)[index]
        kept = None if residual is None else residual[start:end]
        if across.size == 1:
            average_alone(values[start:end], kept, context)
        else:
            # An empty part is averaged too: all ranks must exchange the same messages.
            self.between.average(values[start:end], kept, replace(context, group=across))
        node_reduce.gather()

    def _num_nodes(self, world_size: int) -> int:
        num_nodes, rest = divmod(world_size, self.local_size)
        if rest:
            raise ValueError(
                f"{world_size} ranks cannot be nodes of {self.local_size}; "
                "local_size must divide the number of ranks"
            )
        return num_nodes

    def _node_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of messages within a node: at least fp32, since sums travel on to other nodes."""
        return self.codec.works_in or torch.promote_types(dtype, torch.float32)


def _encoded_bytes(codec: Codec, numels: list[int], num_nodes: int) -> list[int]:
    """Return the bytes that each rank of a node sends within it, for parts of ``numels`` values."""
    sent = [codec.to_owner.wire_bytes(numel) for numel in numels]
    passed_on = [places_in_message(codec, numel, num_nodes)[-1][1] for numel in numels]
    return [
        sum(sent) - own + (len(numels) - 1) * message for own, message in zip(sent, passed_on, strict=True)
    ]
