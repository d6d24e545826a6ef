"""One-shot sums of few values or few ranks: every rank gathers all ranks' values and adds them up itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.scatter import Sum, aligned, aligned_rows, layouts_of, peers_of
from gradwire.exchanges.two_phase import (
    TwoPhaseReduce,
    average_alone,
    shared_two_shot_bytes,
    two_shot_bytes,
)
from gradwire.ops import NO_RANK, Chunk
from gradwire.peers import gather

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
    own = arriving[group.rank, :num_bytes]
    # NCCL gathers over more connections than it sends from rank to rank. Over sockets, a step with int8 and
    # 101 M parameters took 60.4 ms by messages and 48.7 ms by gathering (two ranks that share an H200).
    native = group.native_gather
    messages = None if native else group.post([row[:num_bytes] for row in arriving])
    for each, (begin, end) in zip(sums, places, strict=True):
        if begin < end:
            codec, row, seed = each.used_codec.to_owner, own[begin:end], each.row_seed(group.rank, 0)
            codec.encode(Chunk(each.values, row, each.residual, seed))
            if each.sent is not None:
                codec.decode(row, each.sent, seed)
    if native:
        native(arriving, num_bytes)
    elif messages:
        for peer in peers_of(group):
            messages.send(peer, own)
        messages.finish()
    for each, (begin, end) in zip(sums, places, strict=True):
        if begin < end:
            rows = arriving[:, begin : begin + aligned(end - begin)]
            each.used_codec.sum(each.values, rows, NO_RANK, context.scale, each.chunk_seed(0))


def take_one_round(codecs: Sequence[Codec], num_ranks: int) -> list[bool]:
    """Return for each of several averages if ranks send each other all of its values.

    Two ranks do if values are encoded: they send as many bytes as in two phases, in half as many rounds, and
    do not encode the sum. But not if rows to owners are coarser than sums: all rows would be such rows.
    Values that travel as they are go along with others. By themselves they take two phases, which are less
    work for the same bits.
    """
    may = [num_ranks == 2 and codec.to_owner == codec for codec in codecs]
    pays = any(each and not codec.in_place for each, codec in zip(may, codecs, strict=True))
    return [each and pays for each in may]


def num_rounds(codecs: Sequence[Codec], num_ranks: int) -> int:
    """Return the number of rounds of averages that share their messages."""
    return sum(1 if in_one_round else 2 for in_one_round in {*take_one_round(codecs, num_ranks)})


def average_bytes(shapes: Sequence[tuple[Codec, int]], world_size: int) -> list[int]:
    """Return the exact bytes that each rank sends for averages that share their messages.

    ``shapes`` holds the codec and the number of values of each.
    """
    choices = take_one_round([codec for codec, _ in shapes], world_size)
    in_one = [shape for shape, in_one_round in zip(shapes, choices, strict=True) if in_one_round]
    in_two = [shape for shape, in_one_round in zip(shapes, choices, strict=True) if not in_one_round]
    own = encoded_bytes(in_one) if in_one else 0
    return [(world_size - 1) * own + sent for sent in shared_two_shot_bytes(in_two, world_size)]


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
