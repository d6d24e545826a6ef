"""Rotated blocks in torch: what the kernels must equal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.ops.formats import GAUSSIAN_BOUNDS, GAUSSIAN_LEVELS, MIN_SCALE, RotatedFormat, Seed
from gradwire.ops.operands import Chunk, RotatedRows, Scale
from gradwire.ops.reference.blocks import hashed

_LANES = 16  # sums are taken in this many parts, as wide as a line of the kernels
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
        rotated = _hadamard(_levels(form, packed)) * scales[part.first :][: part.count].float()[:, None]
        block = _flipped(rotated, _signs(part, seed, values.device)).clamp(-_LARGEST, _LARGEST).view(-1)
        target = values[part.start : part.start + block.numel()]
        target.copy_(block[: target.numel()])


def reduce(form: RotatedFormat, chunk: Chunk, terms: RotatedRows, own_index: int, scale: Scale) -> None:
    own = chunk.values
    total = own.new_zeros(own.shape, dtype=torch.float32)
    term = torch.empty_like(total)
    for r, (row, seed) in enumerate(zip(terms.rows, terms.seeds, strict=True)):
        if r == own_index:
            term.copy_(own)
        else:
            decode(terms.form, row, term, seed)
        total = term * scale if r == 0 else total + term * scale
    encode(form, Chunk(total, chunk.row, None, chunk.seed))
    decode(form, chunk.row, own, chunk.seed)


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
    words = hashed((index >> 9) * 16 + (index & 15), seed)
    return ((words >> ((index >> 4) & 31)) & 1).view(part.count, part.size)


def _flipped(x: Tensor, signs: Tensor) -> Tensor:
    return torch.where(signs == 1, -x, x)


def _hadamard(x: Tensor) -> Tensor:
    """Multiply each row by a Hadamard matrix of ones and minus ones; the largest strides come first."""
    count, size = x.shape
    stride = size // 2
    while stride:
        pairs = x.view(count, -1, 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((low + high, low - high), dim=2).view(count, size)
        stride //= 2
    return x


def _encode(form: RotatedFormat, x: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed codes and the bf16 scales of blocks."""
    size = x.shape[1]
    largest = x.abs().amax(dim=1)
    # By a power of two, so that neither sums nor squares overflow or vanish.
    exponent = (largest.view(torch.int32) >> 23).clamp(1, 253)
    up, down = ((254 - exponent) << 23).view(torch.float32), (exponent << 23).view(torch.float32)
    z = _hadamard(_flipped(x * up[:, None], signs))
    magnitudes = z.abs()
    square = _sum(z * z)
    deviation = (square * (1 / size)).sqrt()
    number = torch.zeros_like(z, dtype=torch.int64)
    for bound in GAUSSIAN_BOUNDS[form.bits]:
        number += magnitudes > deviation[:, None] * bound
    levels = _level(form, number)
    product, norm = _sum(_by_bytes(magnitudes * levels)), _sum(_by_bytes(levels * levels))
    scale = square / product if form.unbiased else product / norm
    scale = (scale * (1 / size) * down).clamp(min=MIN_SCALE).to(torch.bfloat16)
    scale = torch.where(largest == 0, torch.zeros_like(scale), scale)
    scale = torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))
    planes = [torch.signbit(z), *((number >> p) & 1 for p in reversed(range(form.bits - 1)))]
    return torch.stack([_packed(plane) for plane in planes], dim=1), scale


def _level(form: RotatedFormat, number: Tensor) -> Tensor:
    """Return the levels of these numbers, without signs."""
    found = torch.empty(number.shape, dtype=torch.float32, device=number.device)
    for i, level in enumerate(GAUSSIAN_LEVELS[form.bits]):
        found.masked_fill_(number == i, level)
    return found


def _by_bytes(x: Tensor) -> Tensor:
    """Return rows in the order in which the kernels pack them: 8 lines for each line of bytes."""
    return x.view(len(x), 8, -1, _LANES).transpose(1, 2).reshape(len(x), -1)


def _sum(x: Tensor) -> Tensor:
    """Return the sum of each row, added up as in the kernels: line by line, then by halves."""
    lines = x.view(len(x), -1, _LANES).unbind(1)
    total = lines[0]
    for line in lines[1:]:
        total = total + line
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _packed(plane: Tensor) -> Tensor:
    """Return a plane of bits as bytes, a row for each block."""
    places = torch.arange(8, device=plane.device)[:, None]
    return (plane.view(len(plane), 8, -1).to(torch.int64) << places).sum(dim=1).to(torch.uint8)


def _levels(form: RotatedFormat, packed: Tensor) -> Tensor:
    """Return the levels, with signs, of packed codes (block, plane, byte)."""
    places = torch.arange(8, device=packed.device)[:, None]
    bits = ((packed.to(torch.int64)[:, :, None, :] >> places) & 1).flatten(2)
    number = torch.zeros_like(bits[:, 0])
    for plane in bits[:, 1:].unbind(1):
        number = number * 2 + plane
    return _flipped(_level(form, number), bits[:, 0])
