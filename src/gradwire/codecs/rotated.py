"""1 to 4 bits per value, of blocks that are rotated first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import ops
from gradwire.codecs.decoded import encode_decoded, reduce_decoded
from gradwire.ops import Chunk, RotatedFormat, RotatedRows


@dataclass(frozen=True)
class Rotated:
    """1 to 4 bits per value, packed, and a bf16 scale for each block of values, which is rotated first.

    A rotation by random signs and a Hadamard matrix spreads each value over its block (Vargaftik et al.,
    arXiv:2105.08339 and 2108.08842). So large values do not dominate a scale, and errors point in another
    direction on every rank and in every step. A decoder needs the seed of the row's sender.

    Blocks of zeros come back as zeros. A block with a value that is not finite comes back as NaN. Sums are
    fp32, whatever the bucket's dtype.
    """

    bits: int = 2
    block: int = 1024
    """Number of values that are rotated together and share a scale, a power of two from 128 to 4096."""
    worker_bits: int | None = None
    """Bits of the rows that are summed, if they are not those of sums.

    Ranks average the errors of these rows away. With 1 bit their scale is unbiased, for that reason; with
    more, the scale of the smallest error trains better.
    """
    unbiased: bool = False
    """True to scale so that errors are nearly zero on average; False to make them smallest."""

    in_place = False
    row_dtype = None
    works_in = torch.float32
    widens_on_cuda = False
    keeps_residual = True
    stochastic = True
    kernels: ClassVar[frozenset[ops.Family]] = frozenset({"rotated"})

    @classmethod
    def of(cls, worker_bits: int, owner_bits: int, block: int = 1024) -> Rotated:
        """Return the codec for rows of ``worker_bits`` and sums of ``owner_bits``.

        With 1 bit, a scale of the smallest error would make a value smaller by a third, so it is unbiased.
        """
        own = None if worker_bits == owner_bits else worker_bits
        return cls(owner_bits, block, own, unbiased=owner_bits == 1)

    def __post_init__(self) -> None:
        # Each raises if the options are not valid.
        self.format  # noqa: B018
        self.to_owner.format  # noqa: B018

    @cached_property
    def format(self) -> RotatedFormat:
        """The layout of its rows."""
        return RotatedFormat(self.bits, self.block, self.unbiased)

    @cached_property
    def to_owner(self) -> Rotated:
        if self.worker_bits is None:
            return self
        return Rotated(self.worker_bits, self.block, unbiased=self.worker_bits == 1)

    @property
    def max_error(self) -> float:
        return max(self.format.max_error, self.to_owner.format.max_error)

    def resolve(self, dtype: torch.dtype) -> Rotated:
        return self

    def wire_bytes(self, numel: int) -> int:
        return self.format.row_bytes(numel)

    def encode(self, chunk: Chunk) -> None:
        if chunk.residual is None:
            ops.encode_rotated(self.format, chunk)
        else:
            encode_decoded(self, chunk.values + chunk.residual, chunk)

    def decode(self, row: Tensor, values: Tensor, seed: ops.Seed = ops.NO_SEED) -> None:
        ops.decode_rotated(self.format, row, values, seed)

    def reduce(
        self, chunk: Chunk, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        if chunk.residual is None:
            terms = RotatedRows(self.to_owner.format, rows, seed)
            ops.reduce_rotated(self.format, chunk, terms, rank, scale)
        else:
            reduce_decoded(self, chunk, rows, rank, scale, seed)

    def sum(
        self, values: Tensor, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        ops.sum_rotated(values, RotatedRows(self.to_owner.format, rows, seed), rank, scale)
