"""The largest values of each block, in torch operations: for messages that are rare, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.ops.formats import LIMITS, MIN_SCALE

_LIMIT = LIMITS["int4"]


@dataclass(frozen=True)
class TopFormat:
    """The ``keep`` largest values of each block of ``block``: bf16 scales, then places, then 4-bit codes.

    The last block counts as full: zeros stand for what it lacks. Places are in order. Their lowest 8 bits are
    bytes; the rest, 0, 2 or 4 bits each, follow packed.
    """

    keep: int
    block: int

    def __post_init__(self) -> None:
        if self.block not in (256, 1024, 4096):
            raise ValueError(f"block must be 256, 1024 or 4096, not {self.block!r}")
        if self.keep % 8 or not 8 <= self.keep <= self.block // 4:
            raise ValueError(
                f"keep must be a multiple of 8, from 8 to a quarter of the block ({self.block // 4}), "
                f"not {self.keep!r}"
            )

    @property
    def high_bits(self) -> int:
        """Bits of a place beyond the lowest 8."""
        return self.block.bit_length() - 9

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def row_bytes(self, numel: int) -> int:
        """Return the exact size of a row of ``numel`` values."""
        return self.num_blocks(numel) * (2 + self.keep + self.keep * self.high_bits // 8 + self.keep // 2)

    def split(self, row: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return views of scales, and of low bytes of places, high bits of places and codes by block."""
        blocks = self.num_blocks(numel)
        sizes = [
            2 * blocks,
            blocks * self.keep,
            blocks * self.keep * self.high_bits // 8,
            blocks * self.keep // 2,
        ]
        scales, low, high, codes = row[: sum(sizes)].split(sizes)
        return scales.view(torch.bfloat16), *(each.view(blocks, -1) for each in (low, high, codes))


def encode(form: TopFormat, x: Tensor, row: Tensor) -> None:
    """Write the largest fp32 values of each block of ``x`` to a row."""
    places, values = _largest(form, x)
    largest = values.abs().amax(dim=1)
    up = (largest / torch.full_like(largest, _LIMIT)).view(torch.int32) + 0xFFFF
    scale = (up & -0x10000).view(torch.float32).clamp(min=MIN_SCALE)
    scale = torch.where(largest == 0, torch.zeros_like(scale), scale)
    scale = torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))
    code = (values * torch.where(scale > 0, 1 / scale, 0.0)[:, None]).round().nan_to_num(0.0)
    scales, low, high, codes = form.split(row, x.numel())
    scales.copy_(scale)
    low.copy_(places & 255)
    if form.high_bits:
        high.copy_(_packed(places >> 8, form.high_bits))
    codes.copy_(_packed(code.to(torch.int64) & 15, 4))


def decode(form: TopFormat, row: Tensor, values: Tensor) -> None:
    """Write the values of a row, and zeros between them."""
    scales, low, high, codes = form.split(row, values.numel())
    places = low.to(torch.int64)
    if form.high_bits:
        places += _unpacked(high, form.high_bits) << 8
    code = _unpacked(codes, 4)
    sent = torch.where(code > 7, code - 16, code).to(torch.float32) * scales.to(torch.float32)[:, None]
    full = sent.new_zeros(len(places), form.block).scatter_(1, places, sent)
    full.masked_fill_(scales.isnan()[:, None], torch.nan)
    values.copy_(full.view(-1)[: values.numel()])


def _largest(form: TopFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of the largest values of each block, in order, and the values."""
    missing = form.num_blocks(x.numel()) * form.block - x.numel()
    blocks = torch.nn.functional.pad(x, (0, missing)).view(-1, form.block)
    places = blocks.abs().topk(form.keep, dim=1, sorted=False).indices.sort(dim=1).values
    return places, blocks.gather(1, places)


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers of ``bits`` each as bytes, the first in the lowest bits."""
    places = torch.arange(0, 8, bits, device=numbers.device)
    return (numbers.view(len(numbers), -1, 8 // bits) << places).sum(dim=2).to(torch.uint8)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    places = torch.arange(0, 8, bits, device=packed.device)
    return ((packed.to(torch.int64)[..., None] >> places) & ((1 << bits) - 1)).flatten(1)
