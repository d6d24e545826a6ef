"""Few bits per value, with a scale for each block of values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import ops
from gradwire.ops import BlockFormat, Chunk, Kind


@dataclass(frozen=True)
class Blocks:
    """8, 4 or 1 bits per value, packed, and a bf16 scale for each block of values.

    ``int8`` and ``int4`` divide a block by its largest magnitude and round to 127 or 7 steps on either
    side of zero. ``fp8`` rounds to e4m3, which has smaller steps near zero. ``sign`` sends signs and the
    mean magnitude. Blocks of zeros come back as zeros. A block with a value that is not finite comes back
    as NaN. Sums are fp32, whatever the bucket's dtype.
    """

    kind: Kind
    block: int
    stochastic: bool = False

    in_place = False
    row_dtype = None
    works_in = torch.float32
    widens_on_cuda = True
    keeps_residual = True
    kernels: ClassVar[frozenset[ops.Family]] = frozenset({"blocks"})

    def __post_init__(self) -> None:
        self.format  # noqa: B018  # raises if the options are not valid

    @cached_property
    def format(self) -> BlockFormat:
        """The layout of its rows."""
        return BlockFormat(self.kind, self.block, self.stochastic)

    @property
    def max_error(self) -> float:
        return self.format.max_error

    @property
    def to_owner(self) -> Blocks:
        return self

    def resolve(self, dtype: torch.dtype) -> Blocks:
        return self

    def wire_bytes(self, numel: int) -> int:
        return self.format.row_bytes(numel)

    def encode(self, chunk: Chunk) -> None:
        ops.encode_blocks(self.format, chunk)

    def decode(self, row: Tensor, values: Tensor, seed: ops.Seed = ops.NO_SEED) -> None:
        ops.decode_blocks(self.format, row, values)

    def reduce(
        self, chunk: Chunk, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        ops.reduce_blocks(self.format, chunk, rows, rank, scale)

    def sum(
        self, values: Tensor, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        ops.sum_blocks(self.format, values, rows, rank, scale)
