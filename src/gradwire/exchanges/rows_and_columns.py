"""A sum over a grid of ranks with every message encoded: along rows, then along columns."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gradwire.codecs import Codec
from gradwire.exchanges.context import Context
from gradwire.exchanges.scatter import Sum, aligned, bounds_of, sum_scattered
from gradwire.exchanges.two_phase import TwoPhaseReduce
from gradwire.peers import Group, gather

Places = tuple[tuple[int, int], ...]
"""The start and end of the row of every rank of a column, in one message along a row."""


def sum_over_grid(whole: Sum, context: Context, row: Group, column: Group) -> None:
    """Give every rank the sum over all ranks of ``whole.values * context.scale``.

    Rank c of a row gets part c of its row's values, encoded, and sums it. The ranks c of all rows sum that
    part in two phases. Then they pass on the sums' rows along their own rows, byte for byte, so all ranks
    decode the same. Values are encoded three times. What the first encoding leaves out is kept in the
    residual of other parts than c. What the other two leave out is kept in that of part c, as
    Note [One residual for two shots] has it.
    """
    codec, numel = whole.used_codec, whole.values.numel()
    parts = bounds_of(numel, row.size)
    # Along rows, other seeds than along columns: the same values are encoded again.
    seeds = None if whole.seeds is None else replace(whole.seeds, seed=whole.seeds.seed + 1)
    sum_scattered([replace(whole, seeds=seeds)], replace(context, group=row, scale=1.0))
    places = [places_in_message(codec, end - start, column.size) for start, end in parts]
    messages = _messages(places, context, whole.values)
    own = slice(*parts[row.rank])
    residual = None if whole.residual is None else whole.residual[own]
    part = Sum(whole.values[own], codec, residual, whole.seeds)
    rows = [messages[row.rank][begin:end] for begin, end in places[row.rank]]
    TwoPhaseReduce([part], replace(context, group=column), rows).run()
    gather(messages, row)
    for number, (start, end) in enumerate(parts):
        if number != row.rank:
            passed_on = replace(whole, values=whole.values[start:end])
            _decode(passed_on, messages[number], places[number])


def places_in_message(codec: Codec, numel: int, num_rows: int) -> Places:
    """Return where a part's encoded sums lie in a message, one for each rank of the part's column."""
    places, end = [], 0
    for first, last in bounds_of(numel, num_rows):
        begin = aligned(end)
        # The memory of a sum's row first holds what goes to its owner.
        end = begin + max(codec.wire_bytes(last - first), codec.to_owner.wire_bytes(last - first))
        places.append((begin, end))
    return tuple(places)


def _messages(places: list[Places], context: Context, values: Tensor) -> list[Tensor]:
    """Return memory for the message of every rank of a row."""
    sizes = [aligned(each[-1][1]) for each in places]
    memory = context.scratch.bytes("passed on", sum(sizes), values.device)
    return [part[: each[-1][1]] for part, each in zip(memory.split(sizes), places, strict=True)]


def _decode(part: Sum, message: Tensor, places: Places) -> None:
    codec = part.used_codec
    for owner, ((begin, _), (start, end)) in enumerate(zip(places, part.bounds(len(places)), strict=True)):
        if start < end:
            row = message[begin : begin + codec.wire_bytes(end - start)]
            codec.decode(row, part.values[start:end], part.row_seed(owner, owner))
