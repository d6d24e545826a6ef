"""Encodings of a run of gradient values: local, pure, and honest about their size."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gradwire.codecs.cast import Cast
from gradwire.codecs.raw import Raw
from gradwire.ops import Scale

__all__ = ["Cast", "Codec", "Raw"]


class Codec(Protocol):
    """What an exchange asks of an encoding. A row is the encoded form of a run of values, as bytes."""

    @property
    def in_place(self) -> bool:
        """Whether a row is, byte for byte, the memory of the values themselves."""
        ...

    def resolve(self, dtype: torch.dtype) -> Codec:
        """The codec to use for buckets of this dtype."""
        ...

    def wire_bytes(self, numel: int) -> int:
        """The exact size of the row of ``numel`` values."""
        ...

    def encode(self, values: Tensor, row: Tensor) -> None:
        """Write the row of ``values``."""
        ...

    def decode(self, row: Tensor, values: Tensor) -> None:
        """Write the values of ``row``."""
        ...

    def reduce(self, rows: Tensor, own: Tensor, rank: int, scale: Scale, row: Tensor) -> None:
        """Write the row of the sum over r of ``values[r] * scale``, in rank order, and decode it to ``own``.

        ``values[rank]`` is ``own``; the others are encoded, one in each row of ``rows``, a matrix of
        bytes whose rows may be longer than what they hold.
        """
        ...
