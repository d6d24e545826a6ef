"""The encoding of each unit: least bytes within an error, or least error within a number of bytes.

Every unit has a few points (bytes, squared error), one per encoding. Errors of units add up, and so do bytes.
For a price of a byte, each unit alone takes the point of its lower convex hull where bytes times price plus
error is least. Going down in price step by step, the units' hull edges are taken in the order of error per
saved byte. Each such stage is the best for its own totals: no other choice has both fewer bytes and a smaller
error (Shoham and Gersho, Efficient bit allocation for an arbitrary set of quantizers, 1988). Between two
stages, the totals differ by one edge. So the result is at most one edge above the least bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Edge:
    """A step of one unit from one encoding to a coarser one."""

    unit: int
    choice: int
    saved: float
    """Bytes that it saves."""
    added: float
    """Squared error that it adds."""

    @property
    def price(self) -> float:
        return self.added / self.saved


def allocate(
    num_bytes: Sequence[Sequence[float]],
    errors: Sequence[Sequence[float]],
    *,
    max_error: float | None = None,
    max_bytes: float | None = None,
) -> list[int]:
    """Return the number of each unit's encoding.

    Args:
        num_bytes: for each unit, the bytes of each of its encodings.
        errors: for each unit, the squared error of each of its encodings.
        max_error: the largest sum of squared errors. Bytes are made least.
        max_bytes: the largest sum of bytes, instead. Errors are made least.

    Encoding 0 of each unit is the one to begin with. If that exceeds ``max_error``, all units keep it. If no
    choice keeps ``max_bytes``, the choice is the one with the fewest.

    >>> allocate([[16, 8, 4]] * 2, [[0, 1, 9], [0, 4, 36]], max_error=14)
    [2, 1]
    >>> allocate([[16, 8, 4]] * 2, [[0, 1, 9], [0, 4, 36]], max_bytes=16)
    [1, 1]
    """
    chosen = [0] * len(num_bytes)
    error, sent = (sum(row[0] for row in table) for table in (errors, num_bytes))
    stuck: set[int] = set()
    hulls = [_hull(unit, *rows) for unit, rows in enumerate(zip(num_bytes, errors, strict=True))]
    # Prices rise along a hull, so this order keeps each unit's edges in theirs.
    for edge in sorted((edge for hull in hulls for edge in hull), key=lambda e: (e.price, e.unit)):
        if max_bytes is not None and sent <= max_bytes and edge.added >= 0:
            break
        if edge.unit in stuck:
            continue
        if max_error is not None and error + edge.added > max_error:
            stuck.add(edge.unit)  # a smaller edge of another unit may still fit
            continue
        chosen[edge.unit] = edge.choice
        error, sent = error + edge.added, sent - edge.saved
    return chosen


def _hull(unit: int, num_bytes: Sequence[float], errors: Sequence[float]) -> list[_Edge]:
    """Return the edges of the lower convex hull, from encoding 0 on, in the order of rising prices."""
    edges: list[_Edge] = []
    now = 0
    while ahead := [
        _Edge(unit, i, num_bytes[now] - num_bytes[i], errors[i] - errors[now])
        for i in range(len(num_bytes))
        if num_bytes[i] < num_bytes[now]
    ]:
        edges.append(min(ahead, key=lambda edge: (edge.price, -edge.saved)))
        now = edges[-1].choice
    return edges
