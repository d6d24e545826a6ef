"""8 bits per value, in equal steps from the smallest value to the largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import ops
from gradwire.codecs.decoded import sum_decoded
from gradwire.ops import affine

_RANGE_BYTES = 8  # a step and the code of zero, in fp32


@dataclass(frozen=True)
class Affine:
    """256 equal steps from the smallest value of a block, or of a whole row, to the largest.

    torch's quantization hooks send this. A step is at least the smallest normal number, so 1e-30 survives.
    Zeros come back as zeros. A block with a value that is not finite comes back as NaN.
    """

    block: int | None = None
    """Number of values that share a range; None for all of a row."""

    in_place = False
    row_dtype = None
    works_in = torch.float32
    widens_on_cuda = False
    keeps_residual = False
    max_error = 1 / 255  # half a step; 255 steps span at most twice the largest magnitude
    stochastic = False
    kernels: ClassVar[frozenset[ops.Family]] = frozenset()

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"block must be at least 1, or None for all of a row, not {self.block}")

    @property
    def to_owner(self) -> Affine:
        return self

    def resolve(self, dtype: torch.dtype) -> Affine:
        return self

    def wire_bytes(self, numel: int) -> int:
        return self._ranges_at(numel) + _RANGE_BYTES * self._num_blocks(numel)

    def encode(self, chunk: ops.Chunk) -> None:
        self._encode(chunk.values, chunk.row)

    def decode(self, row: Tensor, values: Tensor, seed: ops.Seed = ops.NO_SEED) -> None:
        codes, ranges = self._split(row, values.numel())
        affine.decode(codes, ranges, self.block or values.numel(), values)

    def reduce(
        self, chunk: ops.Chunk, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        self.sum(chunk.values, rows, rank, scale)
        self._encode(chunk.values, chunk.row)
        self.decode(chunk.row, chunk.values)

    def sum(
        self, values: Tensor, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        sum_decoded(values, rows, rank, scale, lambda r, term: self.decode(rows[r], term))

    def _encode(self, values: Tensor, row: Tensor) -> None:
        codes, ranges = self._split(row, values.numel())
        affine.encode(values, self.block or values.numel(), codes, ranges)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block) if self.block else min(numel, 1)

    def _ranges_at(self, numel: int) -> int:
        """Return the offset of the ranges in a row: behind the codes, at a multiple of 4 bytes."""
        return -(-numel // 4) * 4

    def _split(self, row: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        begin = self._ranges_at(numel)
        ranges = row[begin : begin + _RANGE_BYTES * self._num_blocks(numel)]
        return row[:numel], ranges.view(torch.float32).view(-1, 2)
