"""One-shot sums of few values: every rank gathers all ranks' values and adds them up itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.scatter import Sum, aligned, aligned_rows, layouts_of
from gradwire.exchanges.two_phase import TwoPhaseReduce, average_alone, two_shot_bytes
from gradwire.ops import Chunk
from gradwire.peers import gather, gather_matrix

# Bytes that a fast network sends in about the time of one more round.
_ROUND_BYTES = 16 << 10


def sum_values(values: Tensor, context: Context) -> None:
    """Replace ``values`` by the sum over ranks of ``values * scale``, in one round or two.

    The sum is in rank order and in the dtype of ``values``. Over NCCL, two rounds are NCCL's own allreduce.
    """
    group = context.group
    num_bytes = values.numel() * values.element_size()
    if group.size == 1:
        average_alone(values, None, context)
        return
    if not one_round_pays(num_bytes, group.size):
        if group.native_sum is not None:
            group.native_sum(values.mul_(context.scale))
            return
        TwoPhaseReduce([Sum(values)], context).run()
        return
    arriving = aligned_rows(context.scratch, "arriving", group.size, num_bytes, values.device)
    rows = [row[:num_bytes] for row in arriving]
    rows[group.rank] = values.view(torch.uint8)
    gather(rows, group)
    chunk = Chunk(values, row=rows[group.rank])
    Raw(values.dtype).reduce(chunk, arriving, group.rank, context.scale)


def sum_encoded(sums: Sequence[Sum], context: Context) -> None:
    """Replace each sum's values by the sum over ranks of ``decoded * scale``, in rank order and in one round.

    Sums are not encoded again. All ranks, the sender too, add what rows decode to, so all have the same bits.
    """
    group = context.group
    places, num_bytes = _row_layout([(each.used_codec, each.values.numel()) for each in sums])
    arriving = aligned_rows(context.scratch, "arriving", group.size, num_bytes, sums[0].values.device)
    for each, (begin, end) in zip(sums, places, strict=True):
        codec, row = each.used_codec.to_owner, arriving[group.rank, begin:end]
        seed = each.row_seed(group.rank, 0)
        codec.encode(Chunk(each.values, row, each.residual, seed))
        codec.decode(row, each.values, seed)
        if each.sent is not None:
            each.sent.copy_(each.values)
    gather_matrix(arriving, [num_bytes] * group.size, group)
    for each, (begin, end) in zip(sums, places, strict=True):
        rows = arriving[:, begin : begin + aligned(end - begin)]
        each.used_codec.sum(each.values, rows, group.rank, context.scale, each.chunk_seed(0))


def encoded_bytes(shapes: Sequence[tuple[Codec, int]]) -> int:
    """Return the bytes that a rank sends to each other in `sum_encoded`.

    ``shapes`` holds the codec and the number of values of each sum.
    """
    return _row_layout(shapes)[1]


def _row_layout(shapes: Sequence[tuple[Codec, int]]) -> tuple[Sequence[tuple[int, int]], int]:
    """Return the place of each sum in a row of all of them, and the row's size."""
    (places,) = layouts_of([(codec.to_owner, numel) for codec, numel in shapes], 1)
    return places, places[-1][1]


def sum_bytes(numel: int, dtype: torch.dtype, world_size: int) -> list[int]:
    """Return the exact bytes that each rank sends in `sum_values`."""
    num_bytes = numel * dtype.itemsize
    if one_round_pays(num_bytes, world_size):
        return [(world_size - 1) * num_bytes] * world_size
    return two_shot_bytes(Raw(dtype), numel, world_size)


def one_round_pays(num_bytes: int, world_size: int) -> bool:
    """Return True if one round is faster than two; between two ranks both send the same bytes."""
    saved = (world_size - 1) * num_bytes * (1 - 2 / world_size)
    return saved <= _ROUND_BYTES
