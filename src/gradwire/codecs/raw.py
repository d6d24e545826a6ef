"""Values as they lie in memory."""

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
    keeps_residual = False
    max_error = 0.0
    stochastic = False
    kernels: ClassVar[frozenset[ops.Family]] = frozenset({"casts"})

    def resolve(self, dtype: torch.dtype) -> Raw:
        return Raw(dtype)

    def wire_bytes(self, numel: int) -> int:
        assert self.dtype is not None, "resolve the codec for a bucket's dtype first"
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, row: Tensor, residual: Tensor | None, seed: ops.Seed) -> None:
        if row.data_ptr() != values.data_ptr():
            self._values(row).copy_(values)

    def decode(self, row: Tensor, values: Tensor) -> None:
        if row.data_ptr() != values.data_ptr():
            values.copy_(self._values(row))

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
        ops.reduce_rows(rows, 0, own, rank, [scale] * len(rows), 1.0, 1.0, own)
        self.encode(own, row, None, seed)

    def _values(self, row: Tensor) -> Tensor:
        assert self.dtype is not None, "resolve the codec for a bucket's dtype first"
        return row.view(self.dtype)
