"""Sums over ranks and residuals, for codecs without kernels of their own for these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gradwire.ops import Chunk, Scale, Seed


class Plain(Protocol):
    """The part of a codec that needs no residual."""

    def encode(self, chunk: Chunk) -> None: ...

    def decode(self, row: Tensor, values: Tensor, seed: Seed) -> None: ...

    def sum(self, values: Tensor, rows: Tensor, rank: int, scale: Scale, seed: Seed) -> None: ...


def sum_decoded(
    values: Tensor, rows: Tensor, rank: int, scale: Scale, decode: Callable[[int, Tensor], None]
) -> None:
    """Replace ``values``, those of ``rank``, by the sum of all ranks' values times ``scale``, in rank order.

    ``decode(r, term)`` decodes the row of rank r to ``term``. With ``rank=NO_RANK`` that is done for all.
    """
    term, total = torch.empty_like(values), torch.zeros_like(values)
    for r in range(len(rows)):
        if r != rank:
            decode(r, term)
        total.add_(values * scale if r == rank else term.mul_(scale))
    values.copy_(total)


def encode_decoded(codec: Plain, x: Tensor, chunk: Chunk, factor: Tensor | float = 1.0) -> Tensor:
    """Encode ``x`` to the chunk's row, keep what it leaves out times ``factor``, return what it sends."""
    codec.encode(Chunk(x, chunk.row, None, chunk.seed))
    sent = torch.empty_like(x)
    codec.decode(chunk.row, sent, chunk.seed)
    residual = chunk.residual
    if residual is not None:
        left_out = (x - sent) * factor
        # What is not finite leaves the residual unchanged.
        residual.copy_(torch.where(left_out.isfinite(), left_out, residual.to(x.dtype)))
    return sent


def reduce_decoded(codec: Plain, chunk: Chunk, rows: Tensor, rank: int, scale: Scale, seed: Seed) -> None:
    """Sum and encode as `Codec.reduce` does."""
    total = chunk.values if chunk.residual is None else chunk.values + chunk.residual
    codec.sum(total, rows, rank, scale, seed)
    # A number stays one: as a tensor it would be copied to the device, which CUDA graphs cannot record.
    inverse = (1 / scale.double()).float() if isinstance(scale, Tensor) else 1 / scale
    chunk.values.copy_(encode_decoded(codec, total, chunk, inverse))
