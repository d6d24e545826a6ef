"""Values in 8 bits, between the least and the largest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import ops
from gradwire.ops import affine

_RANGE_BYTES = 8  # a step and the code of zero, in fp32


@dataclass(frozen=True)
class Affine:
    """256 steps between the least and the largest value of a block, or of a whole row.

    What torch's quantised hooks send. A step is never below the smallest normal number, so 1e-30 survives;
    zeros come back as zeros, and a block with a value that is not finite comes back as NaN.
    """

    block: int | None = None
    """Values that share a range; None for all of a row."""

    in_place = False
    works_in = torch.float32
    keeps_residual = False
    max_error = 1 / 255  # half a step, of 255 from the least value to the largest
    stochastic = False
    kernels: ClassVar[frozenset[ops.Family]] = frozenset()

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"values that share a range are at least 1, not {self.block}")

    def resolve(self, dtype: torch.dtype) -> Affine:
        return self

    def wire_bytes(self, numel: int) -> int:
        return self._ranges_at(numel) + _RANGE_BYTES * self._num_blocks(numel)

    def encode(self, values: Tensor, row: Tensor, residual: Tensor | None, seed: ops.Seed) -> None:
        codes, ranges = self._split(row, values.numel())
        affine.encode(values, self.block or values.numel(), codes, ranges)

    def decode(self, row: Tensor, values: Tensor) -> None:
        codes, ranges = self._split(row, values.numel())
        affine.decode(codes, ranges, self.block or values.numel(), values)

    def reduce(
        self,
        rows: Tensor,
        own: Tensor,
        rank: int,
        scale: ops.Scale,
        row: Tensor,
        residual: Tensor | None,
        seed: ops.Seed,
    ) -> None:
        term, total = torch.empty_like(own), torch.zeros_like(own)
        for r in range(len(rows)):
            if r != rank:
                self.decode(rows[r], term)
            total.add_(own * scale if r == rank else term.mul_(scale))
        self.encode(total, row, None, seed)
        self.decode(row, own)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block) if self.block else min(numel, 1)

    def _ranges_at(self, numel: int) -> int:
        """Where in a row the ranges begin: behind the codes, at a multiple of 4."""
        return -(-numel // 4) * 4

    def _split(self, row: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        begin = self._ranges_at(numel)
        ranges = row[begin : begin + _RANGE_BYTES * self._num_blocks(numel)]
        return row[:numel], ranges.view(torch.float32).view(-1, 2)
