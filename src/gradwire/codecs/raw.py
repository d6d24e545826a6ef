"""Values as they are in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import ops


@dataclass(frozen=True)
class Raw:
    """No encoding: a row is the values' own memory, in the bucket's dtype."""

    dtype: torch.dtype | None = None

    in_place = True
    works_in = None
    widens_on_cuda = False
    keeps_residual = False
    max_error = 0.0
    stochastic = False
    kernels: ClassVar[frozenset[ops.Family]] = frozenset({"casts"})

    @property
    def row_dtype(self) -> torch.dtype | None:
        return self.dtype

    @property
    def to_owner(self) -> Raw:
        return self

    def resolve(self, dtype: torch.dtype) -> Raw:
        return Raw(dtype)

    def wire_bytes(self, numel: int) -> int:
        assert self.dtype is not None, "resolve the codec for a bucket's dtype first"
        return numel * self.dtype.itemsize

    def encode(self, chunk: ops.Chunk) -> None:
        if chunk.row.data_ptr() != chunk.values.data_ptr():
            self._values(chunk.row).copy_(chunk.values)

    def decode(self, row: Tensor, values: Tensor, seed: ops.Seed = ops.NO_SEED) -> None:
        if row.data_ptr() != values.data_ptr():
            values.copy_(self._values(row))

    def reduce(
        self, chunk: ops.Chunk, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        own = chunk.values
        ops.reduce_rows(ops.Terms(own, rank, rows, [scale] * len(rows)), encoded=own, up=1.0, down=1.0)
        self.encode(chunk)

    def sum(
        self, values: Tensor, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        assert self.dtype is not None, "resolve the codec for a bucket's dtype first"
        ops.sum_rows(ops.Terms(values, rank, rows, [scale] * len(rows)), self.dtype)

    def _values(self, row: Tensor) -> Tensor:
        assert self.dtype is not None, "resolve the codec for a bucket's dtype first"
        return row.view(self.dtype)
