"""The options of recipe ``auto``, and the exchanges it chooses from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gradwire.exchanges import Exchange, Mixed, Scattered

Encoding = Literal["fp32", "bf16", "int8", "int4", "int3", "int2"]
ENCODINGS: tuple[Encoding, ...] = ("fp32", "bf16", "int8", "int4", "int3", "int2")
"""The encodings that ``auto`` chooses from, from the finest to the coarsest."""

DEFAULT_BUDGET = 0.3
"""The largest relative error of a step's average; docs/auto.md says how it was found."""


@dataclass(frozen=True)
class Tuning:
    """The options of ``auto``. Raises ValueError for options that cannot be met."""

    budget: float
    max_bytes: float | None
    """The most bytes that a rank may send in a step, whatever the error; None to keep the budget instead."""
    every: int
    log: bool
    encodings: tuple[tuple[Encoding, Exchange], ...]
    """The encodings to choose from, from the finest to the coarsest."""
    tables: tuple[str, ...] = ()
    """The parameters that never go by fewer than 4 bits, since most of their rows have no gradient."""

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1:
            raise ValueError(f"budget is a relative error between 0 and 1, not {self.budget}")
        if self.max_bytes is not None and not 0 < self.max_bytes < math.inf:
            raise ValueError(f"bytes must be above 0, not {self.max_bytes}")
        if self.max_bytes is not None and self.budget != DEFAULT_BUDGET:
            raise ValueError("budget= and bytes= contradict each other: give one of them")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, not {self.every}")

    @property
    def names(self) -> tuple[Encoding, ...]:
        """The names of the encodings, from the finest to the coarsest."""
        return tuple(name for name, _ in self.encodings)

    @property
    def first(self) -> int:
        """The number of the encoding to begin with: 16 bits, or the finest if that is coarser."""
        return self.names.index("bf16") if "bf16" in self.names else 0

    @property
    def is_scattered(self) -> bool:
        """True if each rank gets the sums of its own shards alone."""
        return all(isinstance(exchange, Scattered) for _, exchange in self.encodings)

    def num_allowed(self, name: str) -> int:
        """Return how many of the encodings, counted from the finest, parameter ``name`` may go by."""
        if name not in self.tables:
            return len(self.encodings)
        return max(1, sum(ENCODINGS.index(each) <= ENCODINGS.index("int4") for each in self.names))

    def exchange(self, chosen: Mapping[str, str] | None = None, apart: Sequence[str] = ()) -> Mixed:
        """Return the exchange for a choice of encodings by parameter; others go by the first.

        Parameters of ``apart`` share no block of an encoding with the parameter before them.
        """
        by_encoding: dict[str, list[str]] = {}
        for parameter, encoding in (chosen or {}).items():
            by_encoding.setdefault(encoding, []).append(parameter)
        # Encodings that nobody has are there too: their kernels are compiled when the recipe is attached.
        assigned = ((each, tuple(sorted(by_encoding.get(name, ())))) for name, each in self.encodings)
        return Mixed(tuple(assigned), self.encodings[self.first][1], tuple(apart))


def between(ceiling: Encoding, floor: Encoding) -> tuple[Encoding, ...]:
    """Return the encodings from ``ceiling`` down to ``floor``; ValueError if there are none."""
    for option, given in {"ceiling": ceiling, "floor": floor}.items():
        if given not in ENCODINGS:
            allowed = ", ".join(map(repr, ENCODINGS))
            raise ValueError(f"{option} must be one of {allowed}, not {given!r}")
    first, last = ENCODINGS.index(ceiling), ENCODINGS.index(floor)
    if first > last:
        raise ValueError(f"the ceiling, {ceiling}, sends fewer bytes than the floor, {floor}: swap them")
    return ENCODINGS[first : last + 1]
