"""Random numbers as hashes of places, in torch operations on integers: the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.ops.formats import TIME_STEP, Seed

_WORD = 0xFFFFFFFF


def fill_uniformly(values: Tensor, seed: Seed) -> None:
    """Fill a flat tensor with random numbers from -1/2 to 1/2."""
    index = torch.arange(values.numel(), device=values.device)
    values.copy_(noise(index, seed)).mul_(2.0**-24).sub_(0.5)


def noise(index: Tensor, seed: Seed) -> Tensor:
    """Return 24 random bits for each index, as fp32."""
    return (hashed(index, seed) >> 8).to(torch.float32)


def hashed(index: Tensor, seed: Seed) -> Tensor:
    """Return 32 random bits for each index, in 64-bit integers."""
    low = seed.low if seed.step is None else seed.low + seed.step * TIME_STEP
    return _mix((_mix((index ^ low) & _WORD) + seed.high) & _WORD)


def _mix(x: Tensor) -> Tensor:
    """Hash with lowbias32 (Chris Wellons), in 64-bit integers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
