"""The layout of a row of bytes in which blocks of values share a scale."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int8", "int4", "sign", "fp8"]

# Numbers that stand for the kinds in kernels.
KINDS: dict[str, int] = {"int8": 0, "int4": 1, "sign": 2, "fp8": 3}
_BITS = {"int8": 8, "int4": 4, "sign": 1, "fp8": 8}
# Code of a block's largest magnitude. `sign` has none: its scale is a mean.
LIMITS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
# Distance between the two largest codes.
_STEPS = {"int8": 1, "int4": 1, "fp8": 32}
# The smallest normal fp32 number: the inverse of a smaller scale would overflow.
MIN_SCALE = 2.0**-126
_SCALE_BYTES = 2


@dataclass(frozen=True)
class BlockFormat:
    """Codes of ``kind``, packed, then one bf16 scale for each block of ``block`` values.

    A block of m values takes h = ceil(m * bits / 8) bytes. Byte j holds the codes of the values j, j + h,
    j + 2h and so on, the first in its lowest bits: vector instructions pack this without shuffles. The values
    of one place in their bytes are a *plane*. The last block may be shorter. A value is its code times its
    block's scale, which is exact in fp32. The scale of a block with a value that is not finite is NaN.
    """

    kind: Kind
    block: int
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"there is no encoding {self.kind!r}; use one of {', '.join(KINDS)}")
        if self.block not in (1 << p for p in range(5, 13)):
            raise ValueError(f"block must be a power of two from 32 to 4096, not {self.block!r}")
        if self.stochastic and self.kind == "sign":
            raise ValueError("sign has nothing to round; use stochastic rounding with int8, int4 or fp8")

    @property
    def values_per_byte(self) -> int:
        return 8 // _BITS[self.kind]

    @property
    def max_error(self) -> float:
        """The largest error of a value, relative to the largest magnitude of its block."""
        if self.kind == "sign":
            return 1.0  # bounds a value's distance from the mean magnitude
        # A scale is rounded up to bf16, by 2^-7 at most. A code is rounded to the nearest step; stochastic
        # rounding may take the step on either side.
        step = (1 + 2.0**-7) * _STEPS[self.kind] / LIMITS[self.kind]
        return step if self.stochastic else step / 2

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def code_bytes(self, numel: int) -> int:
        """Return the size of the codes, without the byte that may pad it to an even number."""
        full, rest = divmod(numel, self.block)
        return full * (self.block // self.values_per_byte) + -(-rest // self.values_per_byte)

    def row_bytes(self, numel: int) -> int:
        """Return the exact size of a row of ``numel`` values."""
        return self.scales_offset(numel) + _SCALE_BYTES * self.num_blocks(numel)

    def scales_offset(self, numel: int) -> int:
        """Return the offset of the scales in a row, an even number of bytes."""
        return -(-self.code_bytes(numel) // 2) * 2

    def split(self, row: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views of the codes and of the scales in a row of ``numel`` values."""
        offset = self.scales_offset(numel)
        scales = row[offset : offset + _SCALE_BYTES * self.num_blocks(numel)]
        return row[: self.code_bytes(numel)], scales.view(torch.bfloat16)


@dataclass(frozen=True)
class Seed:
    """Seed of stochastic rounding: value i of a chunk gets the noise ``hash(i, low, high)``."""

    low: int
    high: int

    @classmethod
    def of(cls, *numbers: int) -> Seed:
        """Return a seed made of all the numbers."""
        digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))
