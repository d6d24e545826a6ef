"""Sums over ranks in two phases, scatter-reduce and gather, of several buckets side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.codecs import Codec
from gradwire.exchanges.context import Context
from gradwire.exchanges.scatter import (
    Scatter,
    Seeds,
    Sum,
    aligned_rows,
    chunks_of,
    layouts_of,
    peers_of,
    row_layouts,
    row_sizes,
    values_as_rows,
)
from gradwire.ops import Chunk, Scale, Seed


class TwoPhaseReduce:
    """Sum several tensors over ranks: each rank sums one chunk of every tensor, then sends it to the others.

    Messages of both phases are rows as in `Scatter`. They share memory: a row to an owner arrives there
    before the owner's own row comes back to its place.

    Receives of both phases are posted at once. Gloo sends a row only when it knows of the receive, so one
    that is posted with its own phase would cost the time of a message more.
    """

    def __init__(self, sums: Sequence[Sum], context: Context, rows: Sequence[Tensor] | None = None) -> None:
        """Prepare the rows; values must be on one device, in dtypes that their codecs take.

        ``rows`` is memory for the rows of both phases, and holds the encoded sums at the end; by default it
        is made.
        """
        group = self._group = context.group
        self._scale = context.scale
        codecs = [each.used_codec for each in sums]
        layouts = row_layouts(sums, codecs, group.size)
        sizes = row_sizes(layouts)
        if rows is None:
            rows = values_as_rows(sums, sizes)
        if rows is None:
            to_owners = row_sizes(row_layouts(sums, [codec.to_owner for codec in codecs], group.size))
            row_bytes, device = max(*sizes, *to_owners), sums[0].values.device
            rows = aligned_rows(context.scratch, "rows", group.size, row_bytes, device).unbind()
        self._scatter = Scatter(sums, context, rows)
        self._rows = [row[:num_bytes] for row, num_bytes in zip(rows, sizes, strict=True)]
        is_one_layout = all(codec.to_owner is codec for codec in codecs)
        chunks = self._scatter.chunks if is_one_layout else chunks_of(sums, self._rows, layouts)
        self._shares = [
            _Share(each, codec, own) for each, codec, own in zip(sums, codecs, chunks, strict=True)
        ]

    def run(self) -> None:
        """Give every rank every sum."""
        self.scatter_reduce()
        self.gather()

    def scatter_reduce(self) -> None:
        """Leave the sum of every chunk r on rank r: in its chunk r, and encoded in its row r."""
        self._scatter.post()
        self._gathered = self._group.post(self._rows)
        self._scatter.run()
        for number, share in enumerate(self._shares):
            rows, seed = self._scatter.terms(number)
            share.reduce(rows, self._group.rank, self._scale, seed)

    def gather(self) -> None:
        """Send every rank the encoded sums of all others, and decode them."""
        group, messages = self._group, self._gathered
        for peer in peers_of(group):
            messages.send(peer, self._rows[group.rank])
        for peer in peers_of(group):
            messages.wait(peer)
            for share in self._shares:
                share.decode(peer)
        messages.finish()


@dataclass(frozen=True)
class _Share:
    """One of the sums: its chunks, each with its segment of the row that comes from its owner."""

    sum: Sum
    codec: Codec
    chunks: Sequence[Chunk]

    def reduce(self, rows: Tensor, rank: int, scale: Scale, seed: Seed) -> None:
        """Sum this rank's chunk, of which the others' parts have arrived."""
        chunk = self.chunks[rank]
        if chunk.row.numel():
            self.codec.reduce(self.sum.seeded(chunk, rank, rank), rows, rank, scale, seed)

    def decode(self, peer: int) -> None:
        chunk = self.chunks[peer]
        if chunk.row.numel():
            self.codec.decode(chunk.row, chunk.values, self.sum.row_seed(peer, peer))


def seeds_of(codec: Codec, seed: int, context: Context) -> Seeds | None:
    """Return seeds that differ for every rank, step, bucket and chunk; None if nothing is random."""
    step = context.step if context.step_on_device is None else context.step_on_device
    return Seeds(seed, step, context.layout.index) if codec.stochastic else None


def average_alone(flat: Tensor, residual: Tensor | None, context: Context) -> None:
    """Average on a single rank: add the residual, which then is zero, and scale."""
    if residual is not None:
        flat.add_(residual)
        residual.zero_()
    flat.mul_(context.scale)


def two_shot_bytes(codec: Codec, numel: int, world_size: int) -> list[int]:
    """Return the exact bytes that each rank sends for a sum of ``numel`` values in messages of its own."""
    return shared_two_shot_bytes([(codec, numel)], world_size)


def shared_two_shot_bytes(shapes: Sequence[tuple[Codec, int]], world_size: int) -> list[int]:
    """Return the exact bytes that each rank sends for sums that share their messages.

    ``shapes`` holds the codec and the number of values of each sum.
    """
    if not shapes or world_size == 1:
        return [0] * world_size
    to_owners = [(codec.to_owner, numel) for codec, numel in shapes]
    sent, summed = (row_sizes(layouts_of(each, world_size)) for each in (to_owners, shapes))
    total = sum(sent)
    return [total - to_own + (world_size - 1) * own for to_own, own in zip(sent, summed, strict=True)]
