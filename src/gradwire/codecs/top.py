"""The largest values of each block, with their places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import ops
from gradwire.codecs.decoded_sums import sum_decoded
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
        self._encode(_with_residual(chunk), chunk)

    def decode(self, row: Tensor, values: Tensor, seed: ops.Seed = ops.NO_SEED) -> None:
        top.decode(self.format, row, values)

    def reduce(
        self, chunk: Chunk, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        total = _with_residual(chunk)
        self.sum(total, rows, rank, scale)
        inverse = 1 / torch.as_tensor(scale, dtype=torch.float64, device=total.device)
        chunk.values.copy_(self._encode(total, chunk, inverse.to(torch.float32)))

    def sum(
        self, values: Tensor, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        sum_decoded(values, rows, rank, scale, lambda r, term: self.decode(rows[r], term))

    def _encode(self, x: Tensor, chunk: Chunk, factor: Tensor | float = 1.0) -> Tensor:
        """Encode ``x`` to the chunk's row, keep what it leaves out times ``factor``, return what it sends."""
        top.encode(self.format, x, chunk.row)
        sent = torch.empty_like(x)
        self.decode(chunk.row, sent)
        residual = chunk.residual
        if residual is not None:
            left_out = (x - sent) * factor
            # What is not finite leaves the residual unchanged.
            residual.copy_(torch.where(left_out.isfinite(), left_out, residual.to(x.dtype)))
        return sent


def _with_residual(chunk: Chunk) -> Tensor:
    return chunk.values if chunk.residual is None else chunk.values + chunk.residual
