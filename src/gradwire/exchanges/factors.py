"""The vectors of low-rank factors, apart by their encodings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradwire.codecs import Codec
from gradwire.ops import Batches, Side
from gradwire.torch_private import copy_all_

Which = Literal["all", "leading", "others"]
"""Some vectors of each factor: all of them, the first eighth, or the others."""

_LEADING = 8
"""One in so many vectors of a factor leads."""


@dataclass(frozen=True)
class FactorPart:
    """The vectors of all factors that have one encoding."""

    codec: Codec
    values: Tensor
    """The vectors one after the other; the factors themselves if one encoding is for all vectors."""
    places: list[Tensor]
    """Their places in the factors; empty if ``values`` are the factors."""

    def take(self) -> None:
        """Copy the vectors from the factors."""
        if self.places:
            copy_all_(self._views(), self.places)

    def put_back(self) -> None:
        """Copy the vectors to the factors."""
        if self.places:
            copy_all_(self.places, self._views())

    def _views(self) -> list[Tensor]:
        sizes = [place.numel() for place in self.places]
        parts = zip(self.values.split(sizes), self.places, strict=True)
        return [part.view(place.shape) for part, place in parts]


def factor_part(
    codec: Codec,
    which: Which,
    factors: Tensor,
    batches: Batches,
    side: Side,
    scratch: Callable[[str, int], Tensor],
) -> FactorPart:
    """Return some vectors of ``factors``; ``scratch`` gives memory for a name and a number of values."""
    if which == "all":
        return FactorPart(codec, factors, [])
    places = [batch.factors(side, factors)[:, _range(batch.rank, which)] for batch in batches]
    return FactorPart(codec, scratch(which, sum(place.numel() for place in places)), places)


def num_values(batches: Batches, side: Side, which: Which) -> int:
    """Return the number of values in some vectors of all factors."""
    return sum(
        len(batch.matrices) * _num_vectors(batch.rank, which) * batch.length(side) for batch in batches
    )


def mean_bytes(encodings: list[tuple[Codec, Which]], rank: int) -> float:
    """Return about the bytes of a value, over all vectors of factors of ``rank`` vectors."""
    numel = 1 << 10
    sent = [_num_vectors(rank, which) * codec.wire_bytes(numel) for codec, which in encodings]
    return sum(sent) / (rank * numel)


def _num_vectors(rank: int, which: Which) -> int:
    return len(range(rank)[_range(rank, which)])


def _range(rank: int, which: Which) -> slice:
    num_leading = max(1, rank // _LEADING)
    return {"all": slice(None), "leading": slice(num_leading), "others": slice(num_leading, None)}[which]
