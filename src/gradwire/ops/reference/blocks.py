"""Encodings with a scale per block in torch: what the kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.ops.formats import LIMITS, MIN_SCALE, BlockFormat, Seed
from gradwire.ops.hashes import noise
from gradwire.ops.operands import Chunk, Scale


def encode(form: BlockFormat, chunk: Chunk) -> None:
    x, residual = chunk.values.to(torch.float32), chunk.residual
    if residual is not None:
        x = x + residual
    decoded = _encode(form, x, chunk)
    if residual is not None:
        # A block that is not finite leaves its residual unchanged.
        residual.copy_(torch.where(decoded.isnan(), residual.to(x.dtype), x - decoded))


def decode(form: BlockFormat, row: Tensor, values: Tensor) -> None:
    codes, scales = form.split(row, values.numel())
    full = values.numel() // form.block
    split = full * (form.block // form.values_per_byte)
    if full:
        blocks = values[: full * form.block].view(full, form.block)
        blocks.copy_(_dequantise(form, codes[:split].view(full, -1), scales[:full], form.block))
    if full < scales.numel():
        tail = values[full * form.block :].view(1, -1)
        tail.copy_(_dequantise(form, codes[split:].view(1, -1), scales[full:], tail.shape[1]))


def reduce(form: BlockFormat, chunk: Chunk, rows: Tensor, own_index: int, scale: Scale) -> None:
    own, residual = chunk.values, chunk.residual
    x = _total(form, own if residual is None else own.to(torch.float32) + residual, rows, own_index, scale)
    decoded = _encode(form, x, chunk)
    own.copy_(decoded)
    if residual is not None:
        inverse = 1 / torch.as_tensor(scale, dtype=torch.float64, device=x.device)
        held = (x - decoded) * inverse.to(torch.float32)
        residual.copy_(torch.where(decoded.isnan(), residual.to(x.dtype), held))


def sum_rows(form: BlockFormat, own: Tensor, rows: Tensor, own_index: int, scale: Scale) -> None:
    own.copy_(_total(form, own, rows, own_index, scale))


def _total(form: BlockFormat, own: Tensor, rows: Tensor, own_index: int, scale: Scale) -> Tensor:
    """Return the sum of all terms in fp32, in order."""
    x = own.new_zeros(own.shape, dtype=torch.float32)
    term = torch.empty_like(x)
    for r in range(len(rows)):
        if r != own_index:
            decode(form, rows[r], term)
        else:
            term.copy_(own)
        x = term * scale if r == 0 else x + term * scale
    return x


def _encode(form: BlockFormat, x: Tensor, chunk: Chunk) -> Tensor:
    """Encode ``x`` to the chunk's row, and return what the row decodes to."""
    codes, scales = form.split(chunk.row, x.numel())
    full = x.numel() // form.block
    split = full * (form.block // form.values_per_byte)
    index = torch.arange(x.numel(), device=x.device)
    for part in (slice(0, full), slice(full, None)):
        values = slice(part.start * form.block, None if part.stop is None else part.stop * form.block)
        count = full if part.stop is not None else scales.numel() - full
        if count:
            blocks = x[values].view(count, -1)
            scales[part] = scale = _scale(form, blocks)
            codes[slice(split, None) if part.stop is None else slice(0, split)] = _pack(
                form, _quantise(form, blocks, scale, index[values].view(count, -1), chunk.seed)
            ).view(-1)
    decoded = torch.empty_like(x)
    decode(form, chunk.row, decoded)
    return decoded


def _scale(form: BlockFormat, x: Tensor) -> Tensor:
    """Return a bf16 scale for each row of ``x``."""
    largest = x.abs().amax(dim=1)
    if form.kind == "sign":
        scale = _mean_magnitude(form, x).to(torch.bfloat16)
        scale = scale.clamp(max=torch.finfo(torch.bfloat16).max)
    else:
        # Divided by a tensor: on CUDA, torch divides by a number by multiplying with its inverse.
        quotient = largest / torch.full_like(largest, LIMITS[form.kind])
        up = quotient.view(torch.int32) + 0xFFFF
        scale = (up & -0x10000).view(torch.float32).clamp(min=MIN_SCALE).to(torch.bfloat16)
        scale = torch.where(largest == 0, torch.zeros_like(scale), scale)
    return torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))


def _mean_magnitude(form: BlockFormat, x: Tensor) -> Tensor:
    """Return the mean of ``|x|`` of each row, added up as in the kernels: by planes, then by halves."""
    planes = _planes(form, x.abs() * (1 / x.new_tensor(float(x.shape[1]))))
    lanes = x.new_zeros(len(x), form.block // form.values_per_byte)
    for plane in planes.unbind(1):
        lanes[:, : plane.shape[1]] += plane
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _planes(form: BlockFormat, x: Tensor) -> Tensor:
    """Return blocks as (block, plane, byte), padded with zeros."""
    width = -(-x.shape[1] // form.values_per_byte)
    missing = width * form.values_per_byte - x.shape[1]
    return torch.nn.functional.pad(x, (0, missing)).view(len(x), form.values_per_byte, width)


def _quantise(form: BlockFormat, x: Tensor, scale: Tensor, index: Tensor, seed: Seed) -> Tensor:
    """Return the codes as integers from 0 to 255, one per value; undefined in blocks that are not finite."""
    scale = scale.to(torch.float32)[:, None]
    if form.kind == "sign":
        return (torch.signbit(x) & (scale > 0)).to(torch.uint8)
    y = x * torch.where(scale > 0, 1 / scale, 0.0)
    if form.kind == "fp8":
        return _to_fp8(y, noise(index, seed) if form.stochastic else None)
    if form.stochastic:
        y = y + (noise(index, seed) * 2.0**-24 - 0.5)
        y = y.clamp(-LIMITS[form.kind], LIMITS[form.kind])
    return y.round().nan_to_num(0.0).to(torch.int8).view(torch.uint8)


def _to_fp8(y: Tensor, noise: Tensor | None) -> Tensor:
    """Return the e4m3 codes: torch's cast, or with noise the next code below or above at random."""
    limit = LIMITS["fp8"]
    if noise is None:
        return y.clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8)
    magnitude = y.abs()
    normal = ((magnitude.view(torch.int32) + (noise.to(torch.int32) >> 4)) >> 20) - (120 << 3)
    steps = (magnitude * 512 + (noise * 2.0**-24 - 0.5)).round().to(torch.int32)
    code = torch.where(magnitude < 2.0**-6, steps, normal).clamp(max=0x7E)
    return (code | (torch.signbit(y).to(torch.int32) << 7)).to(torch.uint8)


def _pack(form: BlockFormat, codes: Tensor) -> Tensor:
    bits = 8 // form.values_per_byte
    places = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    wide = (_planes(form, codes).to(torch.int32) & ((1 << bits) - 1)) << places[:, None]
    return wide.sum(dim=1).to(torch.uint8)


def _dequantise(form: BlockFormat, codes: Tensor, scales: Tensor, num_values: int) -> Tensor:
    """Return the values of blocks of ``num_values`` from their packed codes."""
    scale = scales.to(torch.float32)[:, None]
    if form.kind == "int8":
        return codes.view(torch.int8).to(torch.float32) * scale
    if form.kind == "fp8":
        return codes.view(torch.float8_e4m3fn).to(torch.float32) * scale
    bits = 8 // form.values_per_byte
    places = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    planes = (codes.to(torch.int32)[:, None, :] >> places[:, None]) & ((1 << bits) - 1)
    flat = planes.reshape(len(codes), -1)[:, :num_values]
    if form.kind == "int4":
        return torch.where(flat > 7, flat - 16, flat).to(torch.float32) * scale
    return torch.where(flat == 1, -scale, scale)
