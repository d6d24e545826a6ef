"""Samples of gradients: the same pieces of every unit on every rank."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.buckets import as_real
from gradwire.peers import Group, gather_rows
from gradwire.tuning.units import TuningUnit

PIECE = 1024
"""Values of a piece: a multiple of every encoding's block, so that a piece is encoded as in a bucket."""
_SHARE = 1 / 128
# So few values are worth looking at all of them.
_FEW_VALUES = 1 << 15
# The least number of pieces of a unit.
_LEAST_PIECES = 4
# Of a parameter with so few pieces, all are taken.
_FEW_PIECES = 4


@dataclass(frozen=True)
class Piece:
    """Neighbouring values of one parameter; in a bucket of shards, of one chunk."""

    unit: int
    """The number of the parameter's unit."""
    chunk: int
    begin: int
    """Place in the bucket."""
    end: int
    weight: float
    """Number of the parameter's values that each value in the sample stands for."""


@functools.lru_cache(8)
def pieces_of(units: tuple[TuningUnit, ...], step: int) -> tuple[Piece, ...]:
    """Return the pieces to take in a step, in order: at least one of each parameter.

    Pieces are spread evenly over a parameter (systematic sampling), from a start that differs from step to
    step.
    """
    total = sum(unit.numel for unit in units)
    share = max(_SHARE, min(1.0, _FEW_VALUES / max(1, total)))
    pieces: list[Piece] = []
    for number, unit in enumerate(units):
        least = _LEAST_PIECES / unit.numel
        for first, size in _strata(unit):
            places = _spread(size, unit.num_chunks, max(share, PIECE * least), step)
            weight = unit.num_chunks * size / sum(end - start for _, start, end in places)
            for chunk, start, end in places:
                begin = unit.begin + chunk * unit.chunk_numel + first
                pieces.append(Piece(number, chunk, begin + start, begin + end, weight))
    return tuple(pieces)


def _strata(unit: TuningUnit) -> list[tuple[int, int]]:
    """Return the parts of a chunk from which pieces are taken: the first value and the size of each.

    Pieces begin where blocks of an encoding do. So the parts are what lies inside of a parameter, and the
    pieces in which parameters meet, all of which are taken. Vectors are in these: their gradients may be much
    larger than those of matrices, and their blocks hold values of both.
    """
    ends = list(itertools.accumulate(unit.sizes))
    down = {end // PIECE * PIECE for end in ends[:-1]}
    up = {min(ends[-1], -(-end // PIECE) * PIECE) for end in ends[:-1]}
    cuts = {0, ends[-1], *down, *up}
    return [(begin, end - begin) for begin, end in itertools.pairwise(sorted(cuts))]


def _spread(size: int, num_chunks: int, share: float, step: int) -> list[tuple[int, int, int]]:
    """Return the chunks, starts and ends of pieces that are this share of all values, or a little more.

    There are ``size`` values in each chunk.
    """
    num_pieces = -(-size // PIECE)
    in_all = num_chunks * num_pieces
    wanted = min(in_all, max(_FEW_PIECES, math.ceil(share * in_all)))
    numbers = list(range(in_all))
    if wanted < in_all:
        # Multiples of the golden ratio fill an interval evenly. The last piece may be short: it is left out.
        start = step * 0.6180339887498949 % 1
        numbers = [int((i + start) * (in_all - 1) / wanted) for i in range(wanted)]
    places = [divmod(n, num_pieces) for n in numbers]
    return [(chunk, PIECE * n, min(size, PIECE * (n + 1))) for chunk, n in places]


class Sample:
    """Copies of pieces of this rank's gradients in one step."""

    def __init__(self, units: tuple[TuningUnit, ...], step: int) -> None:
        self.units = units
        self._pieces = pieces_of(units, step)
        self._of_bucket: dict[int, list[Piece]] = {}
        for piece in self._pieces:
            self._of_bucket.setdefault(units[piece.unit].bucket, []).append(piece)
        self._taken: dict[int, Tensor] = {}
        self.weight: float | None = None
        """This rank's weight in the mean; None if all ranks count alike."""

    def take(self, index: int, flat: Tensor) -> None:
        """Copy the pieces of bucket ``index``, before it is averaged."""
        values = as_real(flat)
        padding = values.new_zeros(PIECE)
        parts = []
        for piece in self._of_bucket.get(index, ()):
            parts += [values[piece.begin : piece.end], padding[piece.end - piece.begin :]]
        if parts:  # one call, since on CUDA each copy is a kernel
            self._taken[index] = torch.cat(parts).view(-1, PIECE).float()

    def weigh(self, group: Group, device: torch.device) -> None:
        """Multiply by this rank's weight over the largest one, as a weighted mean does; collective.

        Errors are relative to the mean, so its divisor does not matter.
        """
        if self.weight is None:
            return
        weights = gather_rows(torch.tensor(self.weight, dtype=torch.float64, device=device), group)
        largest = weights.max().item()
        for taken in self._taken.values():
            if self.weight == 0:
                taken.zero_()  # not a product: the values of a rank without weight may be infinite
            else:
                taken.mul_(self.weight / largest)

    @property
    def is_whole(self) -> bool:
        """True if every bucket with values has been taken; False if there is none."""
        return bool(self._taken) and self._taken.keys() == {unit.bucket for unit in self.units}

    @property
    def values(self) -> Tensor:
        """All pieces, one per row, in order; a piece that is short ends with zeros."""
        return torch.cat([taken for _, taken in sorted(self._taken.items())])

    @property
    def is_scattered(self) -> bool:
        """True if each rank gets the sum of its chunks alone."""
        return any(unit.is_scattered for unit in self.units)

    def owners(self, num_ranks: int, device: torch.device) -> Tensor:
        """Return the rank that sums each piece: the owner of its chunk; otherwise ranks take turns."""
        if self.is_scattered:
            return torch.tensor([piece.chunk for piece in self._pieces], device=device)
        return torch.arange(len(self._pieces), device=device) % num_ranks

    def without_padding(self, errors: Tensor) -> Tensor:
        """Return errors without those of the zeros that pieces end with, where an exchange has them too.

        A chunk ends with its last piece. In other buckets, further values follow.
        """
        if not self.is_scattered:
            return errors
        lengths = torch.tensor([piece.end - piece.begin for piece in self._pieces], device=errors.device)
        return errors * (torch.arange(PIECE, device=errors.device) < lengths[:, None])

    def scale_up(self, sums: Tensor) -> list[list[float]]:
        """Return estimates for whole units, from sums over each piece: a row per unit, a column per sum."""
        owners = torch.tensor([piece.unit for piece in self._pieces], device=sums.device)
        weights = sums.new_tensor([piece.weight for piece in self._pieces])
        totals = sums.new_zeros((len(self.units), sums.shape[1])).index_add_(
            0, owners, sums * weights[:, None]
        )
        rows: list[list[float]] = totals.tolist()
        return rows

    def used_units(self) -> list[bool]:
        """Return, for each unit, True if this rank has a gradient that is not zero in it."""
        return [row[0] > 0 for row in self.scale_up((self.values != 0).sum(1, keepdim=True).double())]
