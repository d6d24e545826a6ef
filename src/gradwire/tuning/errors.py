"""The errors of encodings on a sample of real gradients, as a mean over ranks has them.

Ranks encode their pieces, sum what these decode to, and encode the mean, as an exchange does. So errors that
ranks share are not taken for errors that cancel out. The exact mean of the pieces travels along. All of it
is one message of a few percent of a bucket's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout, Slot
from gradwire.codecs import Codec
from gradwire.exchanges import PLAIN, Context, Scratch, average
from gradwire.ops import Chunk, Seed
from gradwire.peers import Group
from gradwire.tuning.sampling import Sample

# Sets the seeds of measurements apart from those of exchanges.
_MEASURING = 0x6A09E667


@dataclass(frozen=True)
class ErrorTable:
    """Squared norms of one step's exact average and of each encoding's error, for each unit."""

    norms: list[float]
    errors: list[list[float]]
    """A row for each unit, a column for each encoding."""


def measure_errors(
    exact: Tensor, sample: Sample, codecs: Sequence[Codec], group: Group, step: int
) -> ErrorTable:
    """Return the errors of every codec on the pieces ``exact`` of a sample; collective."""
    means = torch.stack([exact, *(_as_sent(exact, codec, group, step) for codec in codecs)])
    slot = Slot("sample", 0, torch.Size([means.numel()]), (1,))
    layout = BucketLayout(0, torch.float32, (slot,))
    average(means.view(-1), PLAIN, Context(group, Scratch(), 1 / group.size, layout))
    mean = means[0]
    seed = Seed.of(_MEASURING, step)
    sums = [mean]
    for codec, own in zip(codecs, means[1:], strict=True):
        sums.append((_decoded(own, codec, seed) if group.size > 1 else own) - mean)
    figures = torch.stack([each.double().square().sum(1) for each in sums], dim=1)
    rows = sample.scale_up(figures)
    return ErrorTable([row[0] for row in rows], [row[1:] for row in rows])


def _as_sent(exact: Tensor, codec: Codec, group: Group, step: int) -> Tensor:
    """Return the pieces as their owners get them: a rank that sums a piece does not encode its own."""
    if group.size == 1:
        return exact
    decoded = _decoded(exact, codec.to_owner, Seed.of(_MEASURING, step, group.rank))
    decoded[group.rank :: group.size] = exact[group.rank :: group.size]
    return decoded


def _decoded(values: Tensor, codec: Codec, seed: Seed) -> Tensor:
    """Return what the codec makes of values."""
    flat = values.reshape(-1)
    codec = codec.resolve(flat.dtype)
    row = torch.empty(codec.wire_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    codec.encode(Chunk(flat, row, seed=seed))
    decoded = torch.empty_like(flat)
    codec.decode(row, decoded, seed)
    return decoded.view_as(values)
