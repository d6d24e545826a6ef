"""The layout of a row of bytes in which blocks of values share a scale."""

from __future__ import annotations

import functools
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
# The number of cached seeds: a few for each bucket, whatever the step.
_NUM_SEEDS = 4096
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


# The levels and boundaries that suit normally distributed numbers of deviation 1 best, without signs (Max,
# 1960), and the root mean square of the error that is left.
GAUSSIAN_LEVELS = {
    1: (1.0,),
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
GAUSSIAN_BOUNDS = {
    1: (),
    2: (0.9816,),
    3: (0.5006, 1.050, 1.748),
    4: (0.2582, 0.5224, 0.7996, 1.099, 1.437, 1.844, 2.401),
}
_GAUSSIAN_ERRORS = {1: 0.603, 2: 0.343, 3: 0.186, 4: 0.0975}
_UNBIASED_ERRORS = {1: 0.756, 2: 0.366, 3: 0.190, 4: 0.0979}
# The mean square of the levels of 4 bits that normal values are rounded to.
MEAN_SQUARE_4 = 1 - _GAUSSIAN_ERRORS[4] ** 2
# Rotated values are rounded to integers, in this part of their deviation, before they are compared and added
# up: sums of integers do not depend on the order, and those of 4096 values fit into 32 bits.
PART = 2.0**-16
INTEGER_BOUNDS = {
    bits: tuple(int(bound / PART) for bound in bounds) for bits, bounds in GAUSSIAN_BOUNDS.items()
}
# So are sums of squares over every 32nd value: values are at most 2 when they are squared.
SQUARE_UNITS = 2.0**40
# The bits of 2^-31 and 2^34. If the largest magnitude of a block is between, its sums and squares neither
# overflow nor lose anything: squares vanish below 2^-88 of the largest, and count from 2^-40 of it on.
LEAST_SAFE, MOST_SAFE = ((127 + exponent) << 23 for exponent in (-31, 34))
# A tail is padded to at least this many values: the lines that a kernel has in registers at once.
_SMALLEST_TAIL = 128
# Errors of decoded values are nearly normal. One in 5e8 is beyond this many deviations.
_NUM_DEVIATIONS = 6


@dataclass(frozen=True)
class RotatedFormat:
    """Codes of rotated blocks of ``block`` values, ``bits`` each, then one bf16 scale for each block.

    A block is multiplied by random signs and by a Hadamard matrix. That makes its values nearly normal, and
    they are rounded to the levels that suit such values best. Signs come from the sender's seed, so nothing
    is sent for them. Value v of a row has the sign of bit ``(v >> 5) & 31`` of the hash of ``(v >> 10) * 32 +
    (v & 31)``: one hash serves 32 values.

    The last block may be shorter. It is padded with zeros to a power of two, at least 128, and sent so: a
    rotation mixes all of its values.

    Up to 3 bits, a block's scale is the one that fits its levels best. With 4 bits it is that of normal
    values, which saves arithmetic. Of many values, no scale fits much better. A block with a single value
    that is not zero is sent 6 % too small, and two of one magnitude 11 %.

    A block of m values has ``bits`` planes of m / 8 bytes: signs, then the bits of the level's number, the
    highest first. A plane has one bit for each value, in their order, the first in the lowest bit of the
    first byte. The scale of a block with a value that is not finite is NaN.
    """

    bits: int
    block: int
    unbiased: bool = False
    """True to scale so that errors are nearly zero on average over seeds; False to make them smallest."""

    def __post_init__(self) -> None:
        if self.bits not in GAUSSIAN_LEVELS:
            raise ValueError(f"a rotated value takes 1, 2, 3 or 4 bits, not {self.bits!r}")
        if self.block not in (1 << p for p in range(7, 13)):
            raise ValueError(f"block must be a power of two from 128 to 4096, not {self.block!r}")

    @property
    def max_error(self) -> float:
        """Six deviations of a value's error, relative to the largest magnitude of its block.

        The deviation is relative to the block's root mean square, which is at most that magnitude.
        """
        errors = _UNBIASED_ERRORS if self.unbiased else _GAUSSIAN_ERRORS
        return _NUM_DEVIATIONS * errors[self.bits]

    @property
    def fits_scale(self) -> bool:
        """True if a block's scale depends on the levels of its values, and not on its deviation alone."""
        return self.bits < 4

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def tail(self, numel: int) -> int:
        """Return the size of the last block, padded, if it is shorter than others; 0 if it is not."""
        rest = numel % self.block
        return max(_SMALLEST_TAIL, 1 << (rest - 1).bit_length()) if rest else 0

    def scales_offset(self, numel: int) -> int:
        """Return the size of the codes, which is the offset of the scales in a row."""
        return (numel // self.block * self.block + self.tail(numel)) * self.bits // 8

    def row_bytes(self, numel: int) -> int:
        """Return the exact size of a row of ``numel`` values."""
        return self.scales_offset(numel) + _SCALE_BYTES * self.num_blocks(numel)

    def split(self, row: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views of the codes and of the scales in a row of ``numel`` values."""
        offset = self.scales_offset(numel)
        scales = row[offset : offset + _SCALE_BYTES * self.num_blocks(numel)]
        return row[:offset], scales.view(torch.bfloat16)


RANK_STEP = 0x9E3779B9
"""Difference between the seeds of two ranks: odd, so that all are different."""

TIME_STEP = 0x85EBCA6B
"""Difference between the seeds of two training steps: odd, too."""


@dataclass(frozen=True)
class Seed:
    """Seed of stochastic rounding and of rotations: what is random comes from ``hash(i, low, high)``."""

    low: int
    high: int
    step: Tensor | None = None
    """A training step in device memory, from which a kernel makes the step's own seed; None if it is made."""

    @classmethod
    @functools.lru_cache(_NUM_SEEDS)
    def of(cls, *parts: int | str) -> Seed:
        """Return a seed made of all the numbers and texts."""
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))

    def of_step(self, step: int | Tensor) -> Seed:
        """Return a seed of a training step's own; of a step in device memory, once a kernel has read it."""
        if isinstance(step, Tensor):
            return Seed(self.low, self.high, step)
        return Seed((self.low + step * TIME_STEP) & 0xFFFFFFFF, self.high)

    def of_rank(self, rank: int) -> Seed:
        """Return a seed of the rank's own, in a way that a kernel can follow."""
        return Seed(self.low, (self.high + rank * RANK_STEP) & 0xFFFFFFFF, self.step)
