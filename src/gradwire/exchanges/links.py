"""Figures of what a rank sends for a bucket, computed without sending it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Links(NamedTuple):
    """A number of bytes or messages of one rank, split by where they go.

    An exchange that does not distinguish nodes counts everything as `across`.
    """

    within: int
    """The figure for messages to ranks of the same node."""
    across: int
    """The figure for messages to all other ranks."""


def add_up(figures: Iterable[Links]) -> Links:
    """Return the sums of figures.

    >>> add_up([Links(1, 20), Links(3, 40)])
    Links(within=4, across=60)
    """
    return Links(*map(sum, zip(*figures, strict=True)))
