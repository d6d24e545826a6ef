"""Figures of what ranks send for a bucket, told before they do."""

from __future__ import annotations

from typing import NamedTuple


class Links(NamedTuple):
    """A figure for the links of one rank; an exchange that knows of no nodes has all of it `across`."""

    within: int
    """Of messages to ranks of its own node."""
    across: int
    """Of messages to all others."""
