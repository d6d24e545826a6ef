"""One row per recipe, for the tests that all recipes share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradwire import recipe


@dataclass(frozen=True)
class Row:
    """One recipe, and what it is held to."""

    spec: str
    tolerance: float
    """Largest error of a mean, relative to the largest gradient of any rank."""
    exact_bytes: Callable[[int, torch.dtype], int]
    """The size of n encoded values of a dtype, computed independently of the code under test."""
    expect: str = "mean"
    world_size: int | None = 3
    """The number of ranks in `make test`'s run of the invariant matrix; `make test-full` takes 2, 3 and 4.

    None for a row that another comes close to: `make test-full` alone runs it.
    """
    step_tolerance: float | None = None
    """Largest error of a sum over steps in training; None if it follows from the recipe."""
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    @property
    def world_sizes(self):
        """The numbers of ranks to test on."""
        return (4,) if "local_size" in self.spec else (2, 3, 4)

    @property
    def in_training(self):
        """Arguments for `check_hook`, which cannot derive them."""
        return {} if self.step_tolerance is None else {"tolerance": self.step_tolerance}

    @property
    def exchange(self):
        return recipe(self.spec).exchange


def own_size(n, dtype):
    return n * dtype.itemsize


def two_bytes(n, dtype):
    return n * 2


def two_bytes_and_scale(n, dtype):
    return n * 2 + 4 if n and dtype.itemsize > 2 else n * 2


def packed(bits, block):
    """Return the size of codes and scales: whole bytes a block, padded to an even number, and two a scale."""

    def size(n, dtype):
        full, rest = divmod(n, block)
        codes = full * block * bits // 8 + math.ceil(rest * bits / 8)
        return codes + codes % 2 + 2 * math.ceil(n / block)

    return size


def rotated(bits, block):
    """Return the size of codes and scales; the last block is padded to a power of two, at least 128."""

    def size(n, dtype):
        full, rest = divmod(n, block)
        tail = max(128, 2 ** math.ceil(math.log2(rest))) if rest else 0
        return (full * block + tail) * bits // 8 + 2 * math.ceil(n / block)

    return size


def largest(keep, block):
    """Return the size of a scale for each block, and of a place and 4 bits for each value that it sends."""

    def size(n, dtype):
        return math.ceil(n / block) * (2 + keep * (math.log2(block) + 4) / 8)

    return size


# A scale is rounded up to bf16, by at most 2^-7; half a step is 1/254 or 1/14 of the largest value, and in
# fp8 at most half of 2^-3 of a value.
ROUNDED_UP = 1 + 2.0**-7

ROWS = [
    Row("noop", 0.0, lambda n, dtype: 0, expect="local"),
    Row("fp32", 1e-6, own_size),
    Row("fp32:reduction=sum", 1e-6, own_size, expect="sum", world_size=2),
    # Twice half of a last place: 2^-11 relative for fp16, 2^-8 for bf16, once in each phase.
    Row("fp16", 2.0**-10, two_bytes_and_scale, world_size=2),
    Row("bf16", 2.0**-7, two_bytes, world_size=4),
    Row("int8", ROUNDED_UP / 254, packed(8, 256)),
    Row("int8:feedback=true", ROUNDED_UP / 254, packed(8, 256), world_size=None),
    Row("fp8", 2.0**-4, packed(8, 256), world_size=2),
    Row("int4", ROUNDED_UP / 14, packed(4, 128), world_size=4),
    Row("int4:block=64,feedback=false", ROUNDED_UP / 14, packed(4, 64), world_size=2),
    Row("bf16:local_size=2", 2.0**-7, two_bytes, world_size=None),
    Row("int8:local_size=2", ROUNDED_UP / 254, packed(8, 256), world_size=None),
    Row("int4:local_size=2", ROUNDED_UP / 14, packed(4, 128), world_size=4),
    # Ranks in a grid of two by two, where sums of rows are encoded once more.
    Row("bf16:local_size=2,within=same", 2.0**-7, two_bytes, world_size=None),
    Row("int8:local_size=2,within=same", ROUNDED_UP / 254, packed(8, 256), world_size=None),
    Row("int4:local_size=2,within=same", ROUNDED_UP / 14, packed(4, 128), world_size=None),
    # Errors of rotated values have no bound of use: six deviations.
    Row("int3", 6 * 0.186, rotated(3, 1024), world_size=2),
    Row("int2", 6 * 0.343, rotated(2, 1024)),
    Row("int2:local_size=2", 6 * 0.343, rotated(2, 1024), world_size=None),
    Row("int2:local_size=2,within=same", 6 * 0.343, rotated(2, 1024), world_size=None),
    Row("int2:bits=1+2", 6 * 0.756, rotated(2, 1024), world_size=None),
    Row("sign", 6 * 0.756, rotated(1, 1024)),
    Row("sign:local_size=2,within=same", 6 * 0.756, rotated(1, 1024), world_size=None),
    Row("int4:feedback=false,rotated=true", 6 * 0.0975, rotated(4, 1024), world_size=2),
    Row("int4:rotated=true", 6 * 0.0975, rotated(4, 1024), world_size=None),
    # The error of a value is at most its distance from the mean magnitude.
    Row("sign:rotated=false", 1.0, packed(1, 512), world_size=2),
    # A value that is held back may grow for as many steps as it takes to be among the largest.
    Row("topk", 1.0, largest(32, 1024), step_tolerance=3.0, world_size=2),
    Row("topk:momentum=0.9", 1.0, largest(32, 1024), step_tolerance=3.0, world_size=2),
    Row("topk:local_size=2,momentum=0.5", 1.0, largest(32, 1024), step_tolerance=3.0, world_size=None),
    Row("int4:momentum=0.9", ROUNDED_UP / 14, packed(4, 128), world_size=None),
    # Low rank holds back what its factors cannot represent. That is most where biases share one matrix with
    # weights: up to 1.6 times the largest gradient, over twelve seeds. A bucket that is one vector is sent as
    # it is.
    Row("powersgd", 1e-6, own_size, step_tolerance=0.3),
    Row("powersgd:rank=2", 1e-6, own_size, step_tolerance=0.3, world_size=4),
    Row("powersgd:factors=int8+int4", 1e-6, own_size, step_tolerance=0.3, world_size=None),
    Row("powersgd:rank=4,factors=int2", 1e-6, own_size, step_tolerance=0.5, world_size=None),
    Row("powersgd:rank=1,whole=true", 1e-6, own_size, step_tolerance=3.0, world_size=2),
    # It begins in 16 bits, and these tests are over before it decides.
    Row("auto", 2.0**-7, two_bytes, world_size=None),
    Row("acp:rank=2", 1e-6, own_size, step_tolerance=0.4, world_size=2),
]
