"""Encodings of a run of gradient values: local, pure, and honest about their size."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gradwire.codecs.affine import Affine
from gradwire.codecs.blocks import Blocks
from gradwire.codecs.cast import Cast
from gradwire.codecs.raw import Raw
from gradwire.ops import Family, Scale, Seed

__all__ = ["Affine", "Blocks", "Cast", "Codec", "Raw"]


class Codec(Protocol):
    """What an exchange asks of an encoding. A row is the encoded form of a run of values, as bytes."""

    @property
    def in_place(self) -> bool:
        """Whether a row is, byte for byte, the memory of the values themselves."""
        ...

    @property
    def works_in(self) -> torch.dtype | None:
        """The only dtype of values that it encodes; None if it is any."""
        ...

    @property
    def keeps_residual(self) -> bool:
        """Whether it can keep what a row leaves out."""
        ...

    @property
    def max_error(self) -> float:
        """The largest error of a value, relative to the largest that it shares a scale with."""
        ...

    @property
    def stochastic(self) -> bool:
        """Whether it rounds by chance, and so needs a seed for each row."""
        ...

    @property
    def kernels(self) -> frozenset[Family]:
        """What it computes with, to be compiled before the first backward pass."""
        ...

    def resolve(self, dtype: torch.dtype) -> Codec:
        """The codec to use for buckets of this dtype."""
        ...

    def wire_bytes(self, numel: int) -> int:
        """The exact size of the row of ``numel`` values."""
        ...

    def encode(self, values: Tensor, row: Tensor, residual: Tensor | None, seed: Seed) -> None:
        """Write the row of ``values``; with a residual, of their sum, and what the row leaves out to it."""
        ...

    def decode(self, row: Tensor, values: Tensor) -> None:
        """Write the values of ``row``."""
        ...

    def reduce(
        self,
        rows: Tensor,
        own: Tensor,
        rank: int,
        scale: Scale,
        row: Tensor,
        residual: Tensor | None,
        seed: Seed,
    ) -> None:
        """Write the row of the sum over r of ``values[r] * scale``, in rank order, and decode it to ``own``.

        ``values[rank]`` is ``own``, with a residual their sum; the others are encoded, one in each row of
        ``rows``, a matrix of bytes whose rows may be longer than what they hold. What the row leaves out
        of the sum, divided by ``scale``, goes to the residual.
        """
        ...
