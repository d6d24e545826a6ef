"""Operands of kernels: a chunk to encode, and the terms of a sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.ops.formats import RotatedFormat, Seed

Scale = float | Tensor

NO_SEED = Seed(0, 0)

NO_RANK = -1
"""The place of this rank's own values in a sum whose terms are all encoded in rows."""


@dataclass(frozen=True)
class Chunk:
    """Values, and the row of bytes that they are encoded to."""

    values: Tensor
    row: Tensor
    residual: Tensor | None = None
    """Added to the values before they are encoded; becomes what the row leaves out."""
    seed: Seed = NO_SEED
    """Seed of stochastic rounding or of a rotation; not used by codecs that are not random."""


@dataclass(frozen=True)
class Terms:
    """The terms of a sum over ranks: this rank's values, and the other ranks' as rows of bytes."""

    own: Tensor
    own_index: int
    """Place of ``own`` in the order of the sum."""
    rows: Tensor
    """A matrix of bytes, one row per rank. Row ``own_index`` is not read; `NO_RANK` to read all."""
    scales: Sequence[Scale]
    """A factor for each term."""
    header_bytes: int = 0
    """Size of what precedes the values in a row."""


@dataclass(frozen=True)
class RotatedRows:
    """The terms of a sum over ranks as rotated rows."""

    form: RotatedFormat
    rows: Tensor
    """A matrix of bytes, one row per rank; rows may be longer than what they hold."""
    seed: Seed
    """Row r was rotated by ``seed.of_rank(r)``."""
