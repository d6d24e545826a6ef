"""Encodings of gradient values: local, pure, and exact about their size in bytes.

Arithmetic over many values belongs in `ops`, and whatever sends a message in `exchanges`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gradwire.codecs.affine import Affine
from gradwire.codecs.blocks import Blocks
from gradwire.codecs.cast import Cast
from gradwire.codecs.raw import Raw
from gradwire.codecs.rotated import Rotated
from gradwire.codecs.top import Top
from gradwire.ops import NO_SEED, Chunk, Family, Scale, Seed

__all__ = ["Affine", "Blocks", "Cast", "Codec", "Raw", "Rotated", "Top"]


class Codec(Protocol):
    """An encoding of values as a row of bytes."""

    @property
    def in_place(self) -> bool:
        """True if a row is, byte for byte, the memory of the values themselves."""
        ...

    @property
    def row_dtype(self) -> torch.dtype | None:
        """The dtype of the values in a row, if it holds nothing else; None if it does."""
        ...

    @property
    def works_in(self) -> torch.dtype | None:
        """The only dtype that it encodes; None if it encodes any."""
        ...

    @property
    def widens_on_cuda(self) -> bool:
        """True if on CUDA it also encodes and sums 16-bit values, in fp32 and without a copy."""
        ...

    @property
    def keeps_residual(self) -> bool:
        """True if it can keep what a row leaves out in a residual."""
        ...

    @property
    def max_error(self) -> float:
        """The largest error of a value, relative to the largest value that shares its scale.

        For errors without a useful bound, six times their deviation.
        """
        ...

    @property
    def stochastic(self) -> bool:
        """True if its rows are random, and so need a seed each."""
        ...

    @property
    def to_owner(self) -> Codec:
        """The codec of the rows that `reduce` sums; most use one codec for these and for sums."""
        ...

    @property
    def kernels(self) -> frozenset[Family]:
        """The kernels that it uses, to be compiled before the first backward pass."""
        ...

    def resolve(self, dtype: torch.dtype) -> Codec:
        """Return the codec to use for buckets of this dtype."""
        ...

    def wire_bytes(self, numel: int) -> int:
        """Return the exact size of a row of ``numel`` values."""
        ...

    def encode(self, chunk: Chunk) -> None:
        """Encode the chunk's values, plus its residual if there is one, to its row.

        The residual becomes what the row leaves out.
        """
        ...

    def decode(self, row: Tensor, values: Tensor, seed: Seed = NO_SEED) -> None:
        """Decode ``row``, which was encoded with ``seed``, to ``values``."""
        ...

    def reduce(self, chunk: Chunk, rows: Tensor, rank: int, scale: Scale, seed: Seed = NO_SEED) -> None:
        """Sum ``values[r] * scale`` over ranks r in order, and encode the sum to the chunk's row.

        ``values[rank]`` are the chunk's values, plus its residual if there is one. Those of another rank are
        encoded by `to_owner` in its row of ``rows``, a matrix of bytes whose rows may be longer than what
        they hold, with ``seed.of_rank(r)``. The chunk's values become what its row decodes to; the residual
        becomes what the row leaves out of the sum, divided by ``scale``.
        """
        ...

    def sum(self, values: Tensor, rows: Tensor, rank: int, scale: Scale, seed: Seed = NO_SEED) -> None:
        """Sum as `reduce` does, and leave the sum in ``values``, without encoding it.

        With ``rank=NO_RANK`` rows hold all terms, and ``values`` are only written.
        """
        ...
