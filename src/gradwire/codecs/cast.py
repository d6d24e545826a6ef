"""Values cast to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import ops
from gradwire.codecs.raw import Raw

_SCALE_BYTES = 4  # one fp32 before the values
# The largest magnitude of a row is scaled to [2^14, 2^15): fp16 ends at 65504.
_TOP_EXPONENT = 15
# Keeps the scale and its inverse normal fp32 numbers, which survive where denormals are flushed.
_MAX_EXPONENT = 126


@dataclass(frozen=True)
class Cast:
    """Values as bf16 or fp16.

    bf16 has the range of fp32. fp16 does not, so a row of fp16 starts with the power of two that its values
    are to be multiplied by: 80000 travels, and so does 1e-30. Buckets that are no wider than ``dtype`` travel
    as they are.
    """

    dtype: torch.dtype

    in_place = False
    works_in = None
    widens_on_cuda = False
    keeps_residual = False
    stochastic = False
    kernels: ClassVar[frozenset[ops.Family]] = frozenset({"casts"})

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Cast sends torch.float16 or torch.bfloat16, not {self.dtype}")

    @property
    def row_dtype(self) -> torch.dtype | None:
        return None if self._header_bytes else self.dtype

    @property
    def max_error(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    @property
    def to_owner(self) -> Cast:
        return self

    def resolve(self, dtype: torch.dtype) -> Cast | Raw:
        return self if self.dtype.itemsize < dtype.itemsize else Raw(dtype)

    def wire_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize + (self._header_bytes if numel else 0)

    def encode(self, chunk: ops.Chunk) -> None:
        header, halves = self._split(chunk.row)
        up: ops.Scale = 1.0
        if header is not None:
            up, down = _power_of_two_scale(ops.absmax(chunk.values))
            header.copy_(down)
        ops.cast_scaled(chunk.values, up, halves)

    def decode(self, row: Tensor, values: Tensor, seed: ops.Seed = ops.NO_SEED) -> None:
        header, halves = self._split(row)
        ops.cast_scaled(halves, 1.0 if header is None else header, values)

    def reduce(
        self, chunk: ops.Chunk, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        header, encoded = self._split(chunk.row)
        scales: list[ops.Scale] = [scale] * len(rows)
        up: ops.Scale = 1.0
        down: ops.Scale = 1.0
        if header is not None:
            # In fp64: this bound may overflow fp32 where the sum itself does not.
            largest = ops.absmax(chunk.values).double() * scale
            for r in range(len(rows)):
                row_header = self._split(rows[r])[0]
                if r != rank and row_header is not None:
                    scales[r] = row_header * scale
                    largest = largest + row_header.double() * scale * 2.0**_TOP_EXPONENT
            # No sum is larger than the sum of the largest magnitudes.
            up, down = _power_of_two_scale(largest)
            header.copy_(down)
        ops.reduce_rows(ops.Terms(chunk.values, rank, rows, scales, self._header_bytes), encoded, up, down)

    def sum(
        self, values: Tensor, rows: Tensor, rank: int, scale: ops.Scale, seed: ops.Seed = ops.NO_SEED
    ) -> None:
        headers = [None if r == rank else self._split(rows[r])[0] for r in range(len(rows))]
        scales = [scale if header is None else header * scale for header in headers]
        ops.sum_rows(ops.Terms(values, rank, rows, scales, self._header_bytes), self.dtype)

    @property
    def _header_bytes(self) -> int:
        return _SCALE_BYTES if self.dtype == torch.float16 else 0

    def _split(self, row: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return views of a row's scale, 0-d, or None if it has none, and of its values."""
        header = row[: self._header_bytes].view(torch.float32)[0] if self._header_bytes else None
        return header, row[self._header_bytes :].view(self.dtype)


def _power_of_two_scale(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the power of two that scales ``largest`` just below 2^15, and its inverse; 1 if not finite."""
    exponent = _TOP_EXPONENT - torch.frexp(largest).exponent
    exponent = torch.where(torch.isfinite(largest), exponent, 0).clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    one = torch.ones_like(largest)
    return torch.ldexp(one, exponent), torch.ldexp(one, -exponent)
