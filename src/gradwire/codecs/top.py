"""The largest values of each block, with their places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import ops
from gradwire.codecs.decoded import encode_decoded, reduce_decoded, sum_decoded
from gradwire.ops import Chunk, top


@dataclass(frozen=True)
class Top:
    """The largest values of each block, in 4 bits and a bf16 scale, with their places; zeros for the others.

    A block with a value that is not finite comes back as NaN. Sums are fp32, whatever the bucket's dtype.
    """

    keep: int = 32
    """Number of values that each block sends, a multiple of 8."""
    block: int = 1024

    in_place = False
    row_dtype = None
    works_in = torch.float32
    widens_on_cuda = False
    keeps_residual = True
    max_error = 1.0  # a value that is left out is at most the largest
    stochastic = False
    kernels: ClassVar[frozenset[ops.Family]] = frozenset()

    def __post_init__(self) -> None:
        self.format  # noqa: B018  # raises if the options are not valid

    @cached_property
    def format(self) -> top.TopFormat:
        """The layout of its rows."""
        return top.TopFormat(self.keep, self.block)

    @property
    def to_owner(self) -> Top:
        return self

    def resolve(self, dtype: torch.dtype) -> Top:
        return self

    def wire_bytes(self, numel: int) -> int:
        return self.format.row_bytes(numel)

    def encode(self, chunk: Chunk) -> None:
        if chunk.residual is None:
            top.encode(self.format, chunk.values, chunk.row)
        else:
            encode_decoded(self, chunk.values + chunk.residual, chunk)

    def decode(self, row: Tensor, values: Tensor, seed: ops.Seed = ops.NO_SEED) -> None:
        top.decode(self.format, row, values)

    def reduce(
        self, chunk: Chunk, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        reduce_decoded(self, chunk, rows, rank, scale, seed)

    def sum(
        self, values: Tensor, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        sum_decoded(values, rows, rank, scale, lambda r, term: self.decode(rows[r], term))
