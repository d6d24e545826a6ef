"""The errors of encodings on a sample of real gradients, as a mean over ranks has them.

Ranks encode their pieces, sum what these decode to, and encode the mean, as an exchange does. So errors that
ranks share are not taken for errors that cancel out. The exact mean of the pieces travels along. All of it
is two messages of a few percent of a bucket's bytes. In a reduce-scatter, and between two ranks, the mean is
not encoded, so its error is that of the pieces alone.

Note [What a budget bounds]: let r be a unit's error over its norm. SGD takes gradients as they are, so a unit
counts by its share of the squared gradient. Optimizers like AdamW divide each value by its recent size, so
there it counts by its share of the values. A budget bounds the root of the sum of r^2, each with the larger
of these two shares. So it bounds the relative error of the whole gradient, and the root mean square of r over
all values. Units whose gradient is zero have no r: only their errors count, as parts of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout, Slot
from gradwire.codecs import Cast, Codec
from gradwire.exchanges import PLAIN, Context, Exchange, Scratch, TwoShot, average, num_rounds
from gradwire.ops import Chunk, Seed
from gradwire.peers import Group
from gradwire.tuning.sampling import Sample

# Sets the seeds of measurements apart from those of exchanges.
_MEASURING = 0x6A09E667
_SHORT = TwoShot(Cast(torch.bfloat16))


@dataclass(frozen=True)
class ErrorTable:
    """Squared norms of one step's exact average and of each encoding's error, for each unit."""

    norms: list[float]
    errors: list[list[float]]
    """A row for each unit, a column for each encoding."""

    def relative(self, sizes: Sequence[int]) -> list[list[float]]:
        """Return squared errors relative to the gradient of units with ``sizes`` values.

        Their sum over units is the square of what a budget bounds: see Note [What a budget bounds].
        """
        pairs = list(zip(sizes, self.norms, strict=True))
        whole = math.fsum(self.norms) or math.inf  # to no gradient, nothing is relative
        num_values = sum(size for size, norm in pairs if norm)
        factors = [max(1 / whole, size / num_values / norm if norm else 0.0) for size, norm in pairs]
        return [[factor * error for error in row] for factor, row in zip(factors, self.errors, strict=True)]


def measure_errors(
    exact: Tensor, sample: Sample, codecs: Sequence[Codec], group: Group, step: int
) -> ErrorTable:
    """Return the errors of every codec on the pieces ``exact`` of a sample; collective."""
    lossy = [number for number, codec in enumerate(codecs) if not codec.in_place]
    left_out = [_as_sent(exact, sample, codecs[number], group, step) - exact for number in lossy]
    mean = _mean_of([exact], PLAIN, group)[0]
    seed = Seed.of(_MEASURING, step)
    sums = [mean, *(torch.zeros_like(mean) for _ in codecs)]
    # Errors travel in 16 bits: they need not be exact themselves.
    for number, error in zip(lossy, _mean_of(left_out, _SHORT, group) if lossy else (), strict=True):
        own, codec = mean + error, codecs[number]
        own = _decoded(own, codec, seed) if _encodes_mean(sample, codec, group) else own
        sums[1 + number] = sample.without_padding(own - mean)
    figures = torch.stack([each.double().square().sum(1) for each in sums], dim=1)
    rows = sample.scale_up(figures)
    return ErrorTable([row[0] for row in rows], [row[1:] for row in rows])


def _mean_of(values: Sequence[Tensor], exchange: Exchange, group: Group) -> Tensor:
    """Return the means over ranks, in one message; collective."""
    means = torch.stack(tuple(values))
    slot = Slot("sample", 0, torch.Size([means.numel()]), (1,))
    layout = BucketLayout(0, torch.float32, (slot,))
    average(means.view(-1), exchange, Context(group, Scratch(), 1 / group.size, layout))
    return means


def _encodes_mean(sample: Sample, codec: Codec, group: Group) -> bool:
    """Return True if an exchange encodes the mean once more."""
    return group.size > 1 and not sample.is_scattered and num_rounds([codec], group.size) == 2


def _as_sent(exact: Tensor, sample: Sample, codec: Codec, group: Group, step: int) -> Tensor:
    """Return the pieces as they are summed: a rank that is the only one to sum a piece does not encode it."""
    if group.size == 1:
        return exact
    decoded = _decoded(exact, codec.to_owner, Seed.of(_MEASURING, step, group.rank))
    if not sample.is_scattered and not _encodes_mean(sample, codec, group):
        return decoded
    is_own = sample.owners(group.size, exact.device) == group.rank
    return torch.where(is_own[:, None], exact, decoded)


def _decoded(values: Tensor, codec: Codec, seed: Seed) -> Tensor:
    """Return what the codec makes of values."""
    flat = values.reshape(-1)
    row = torch.empty(codec.wire_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    codec.encode(Chunk(flat, row, seed=seed))
    decoded = torch.empty_like(flat)
    codec.decode(row, decoded, seed)
    return decoded.view_as(values)
