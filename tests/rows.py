"""One row per recipe: what the shared laws need to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradwire import recipe


@dataclass(frozen=True)
class Row:
    """What a recipe promises."""

    spec: str
    tolerance: float
    """Largest error of a mean, relative to the largest gradient of any rank."""
    exact_bytes: Callable[[int, torch.dtype], int]
    """Size of an encoded run of n values of a dtype, written down independently of the code."""
    expect: str = "mean"

    @property
    def exchange(self):
        return recipe(self.spec).exchange


def own_size(n, dtype):
    return n * dtype.itemsize


def two_bytes(n, dtype):
    return n * 2


def two_bytes_and_scale(n, dtype):
    return n * 2 + 4 if n and dtype.itemsize > 2 else n * 2


ROWS = [
    Row("noop", 0.0, lambda n, dtype: 0, expect="local"),
    Row("fp32", 1e-6, own_size),
    Row("fp32:reduction=sum", 1e-6, own_size, expect="sum"),
    # Twice half of a last place: 2^-11 relative for fp16, 2^-8 for bf16, once in each shot.
    Row("fp16", 2.0**-10, two_bytes_and_scale),
    Row("bf16", 2.0**-7, two_bytes),
]
