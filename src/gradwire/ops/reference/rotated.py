"""Rotated blocks in torch: what the kernels must equal.

Numbers are added in an order that suits vectors and threads alike: the second half of a block to the first,
until 32 are left. The rest are sums of integers, which are the same in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.ops.formats import (
    GAUSSIAN_LEVELS,
    INTEGER_BOUNDS,
    MEAN_SQUARE_4,
    MIN_SCALE,
    PART,
    SQUARE_UNITS,
    RotatedFormat,
    Seed,
)
from gradwire.ops.hashes import hashed
from gradwire.ops.operands import Chunk, RotatedRows, Scale

_COLUMNS = 32  # of which a thread of a GPU has one
_LARGEST = torch.finfo(torch.float32).max


def encode(form: RotatedFormat, chunk: Chunk) -> None:
    values = chunk.values.to(torch.float32)
    codes, scales = form.split(chunk.row, values.numel())
    for part in _parts(form, values.numel()):
        block = values.new_zeros(part.count * part.size)
        taken = values[part.start : part.start + block.numel()]
        block[: taken.numel()] = taken
        signs = _signs(part, chunk.seed, values.device)
        packed, scale = _encode(form, block.view(part.count, part.size), signs)
        codes[part.first_byte(form) :][: packed.numel()] = packed.view(-1)
        scales[part.first : part.first + part.count] = scale


def decode(form: RotatedFormat, row: Tensor, values: Tensor, seed: Seed) -> None:
    codes, scales = form.split(row, values.numel())
    for part in _parts(form, values.numel()):
        num_bytes = part.count * part.size * form.bits // 8
        packed = codes[part.first_byte(form) :][:num_bytes].view(part.count, form.bits, part.size // 8)
        strides = [1 << p for p in range(part.size.bit_length() - 1)]
        rotated = _mixed(_levels(form, packed), strides) * scales[part.first :][: part.count].float()[:, None]
        block = _flipped(rotated, _signs(part, seed, values.device)).clamp(-_LARGEST, _LARGEST).view(-1)
        target = values[part.start : part.start + block.numel()]
        target.copy_(block[: target.numel()])


def reduce(form: RotatedFormat, chunk: Chunk, terms: RotatedRows, own_index: int, scale: Scale) -> None:
    total = _sum(chunk.values, terms, own_index, scale)
    encode(form, Chunk(total, chunk.row, None, chunk.seed))
    decode(form, chunk.row, chunk.values, chunk.seed)


def sum_rows(own: Tensor, terms: RotatedRows, own_index: int, scale: Scale) -> None:
    own.copy_(_sum(own, terms, own_index, scale))


def _sum(own: Tensor, terms: RotatedRows, own_index: int, scale: Scale) -> Tensor:
    total = own.new_zeros(own.shape, dtype=torch.float32)
    term = torch.empty_like(total)
    for r, row in enumerate(terms.rows):
        if r == own_index:
            term.copy_(own)
        else:
            decode(terms.form, row, term, terms.seed.of_rank(r))
        total = term * scale if r == 0 else total + term * scale
    return total


class _Part:
    """Blocks of one size: ``count`` of them, from block ``first`` and value ``start`` on."""

    def __init__(self, first: int, count: int, size: int, start: int) -> None:
        self.first, self.count, self.size, self.start = first, count, size, start

    def first_byte(self, form: RotatedFormat) -> int:
        return self.start * form.bits // 8


def _parts(form: RotatedFormat, numel: int) -> Iterator[_Part]:
    full, tail = numel // form.block, form.tail(numel)
    if full:
        yield _Part(0, full, form.block, 0)
    if tail:
        yield _Part(full, 1, tail, full * form.block)


def _signs(part: _Part, seed: Seed, device: torch.device) -> Tensor:
    """Return the signs of a part's values as bits, a row for each block."""
    index = torch.arange(part.start, part.start + part.count * part.size, device=device)
    words = hashed((index >> 10) * 32 + (index & 31), seed)
    return ((words >> ((index >> 5) & 31)) & 1).view(part.count, part.size)


def _flipped(x: Tensor, signs: Tensor) -> Tensor:
    return torch.where(signs == 1, -x, x)


def _mixed(x: Tensor, strides: list[int]) -> Tensor:
    """Multiply each row by a Hadamard matrix of ones and minus ones.

    Values that are a stride apart are added and subtracted. The order of strides changes roundings only.
    """
    count, size = x.shape
    for stride in strides:
        pairs = x.view(count, -1, 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((low + high, low - high), dim=2).view(count, size)
    return x


def _encode(form: RotatedFormat, x: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed codes and the bf16 scales of blocks."""
    size = x.shape[1]
    largest = x.abs().amax(dim=1)
    # By a power of two, so that neither sums nor squares overflow or vanish.
    exponent = (largest.view(torch.int32) >> 23).clamp(1, 253)
    up, down = ((254 - exponent) << 23).view(torch.float32), (exponent << 23).view(torch.float32)
    x = _flipped(x * up[:, None], signs)
    # The deviation of rotated values is the norm of the block.
    deviation = _square(x).sqrt()
    unit = torch.where(deviation > 0, torch.full_like(deviation, 1 / PART) / deviation, 0.0)
    z = _mixed(x, [size >> p for p in range(1, size.bit_length())])
    parts = (z * unit[:, None]).abs().round().nan_to_num(0.0).to(torch.int32)
    number = torch.zeros_like(parts)
    for bound in INTEGER_BOUNDS[form.bits]:
        number += parts > bound
    product, norm = _products(form, number, parts)
    scale = deviation / product * (1 / PART) if form.unbiased else product / norm * deviation * (PART / size)
    scale = scale * down
    # A block that is too small for a scale becomes zeros.
    is_zero = (scale < MIN_SCALE) | (largest == 0)
    scale = torch.where(is_zero, torch.zeros_like(scale), scale).to(torch.bfloat16)
    scale = torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))
    signs = torch.signbit(z) & (largest > 0)[:, None]  # a block of zeros has no signs
    planes = [signs, *((number >> p) & 1 for p in reversed(range(form.bits - 1)))]
    return torch.stack([_packed(plane) for plane in planes], dim=1), scale


def _products(form: RotatedFormat, number: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's sums of parts times levels, and of squares of levels."""
    count, size = parts.shape
    product = norm = torch.zeros(count, dtype=torch.float32, device=parts.device)
    if not form.fits_scale:  # those of normal values
        norm = norm + _rounded(size * MEAN_SQUARE_4)
        return norm / PART, norm
    for i, level in enumerate(GAUSSIAN_LEVELS[form.bits]):
        of_level = number == i
        product = product + (parts * of_level).sum(dim=1).to(torch.float32) * _rounded(level)
        norm = norm + of_level.sum(dim=1).to(torch.float32) * _rounded(level * level)
    return product, norm


def _rounded(number: float) -> float:
    """Return the fp32 number next to this one."""
    return float(torch.tensor(number, dtype=torch.float32))


def _square(x: Tensor) -> Tensor:
    """Return the sum of squares of each row."""
    x = x * x
    while x.shape[1] > _COLUMNS:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return (x * SQUARE_UNITS).nan_to_num(0.0).to(torch.int64).sum(dim=1).to(torch.float32) * (
        1 / SQUARE_UNITS
    )


def _packed(plane: Tensor) -> Tensor:
    """Return a plane of bits as bytes, a row for each block."""
    places = torch.arange(8, device=plane.device)
    return (plane.view(len(plane), -1, 8).to(torch.int64) << places).sum(dim=2).to(torch.uint8)


def _levels(form: RotatedFormat, packed: Tensor) -> Tensor:
    """Return the levels, with signs, of packed codes (block, plane, byte)."""
    places = torch.arange(8, device=packed.device)
    bits = ((packed.to(torch.int64)[..., None] >> places) & 1).flatten(2)
    number = torch.zeros_like(bits[:, 0])
    for plane in bits[:, 1:].unbind(1):
        number = number * 2 + plane
    found = torch.empty(number.shape, dtype=torch.float32, device=number.device)
    for i, level in enumerate(GAUSSIAN_LEVELS[form.bits]):
        found.masked_fill_(number == i, level)
    return _flipped(found, bits[:, 0])
