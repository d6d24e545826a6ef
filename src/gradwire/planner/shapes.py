"""Models as lists of shapes, and how DDP cuts them into buckets. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Shape = tuple[int, ...]

_DEFAULT_BUCKET_MB = 25.0
# DDP's own first bucket, unless a size is asked for: it is small, so that communication starts early.
_FIRST_BUCKET_MB = 1.0


def typical_shapes(num_parameters: int) -> list[Shape]:
    """The shapes of a transformer with that many parameters.

    Its width is chosen as models of that size have it, one layer for each 64 of width; a layer has four
    matrices of width x width, three of them in one, and two of four times that. The last one is cut short.

    >>> typical_shapes(19_000_000)[:4]
    [(1398, 466), (466, 466), (1864, 466), (1864, 466)]
    """
    width = max(1, round((num_parameters * 64 / 12) ** (1 / 3)))
    shapes: list[Shape] = []
    left = num_parameters
    for rows in itertools.cycle((3 * width, width, 4 * width, 4 * width)):
        if left < rows * width:
            break
        shapes.append((rows, width))
        left -= rows * width
    rows, rest = divmod(left, width)
    return shapes + ([(rows, width)] if rows else []) + ([(rest,)] if rest else [])


def ddp_buckets(
    shapes: Sequence[Shape], bucket_mb: float | None = None, bytes_per_value: float = 4
) -> list[list[Shape]]:
    """The shapes of each bucket of gradients, in the order in which a backward pass has them ready.

    A bucket is closed by the parameter that fills it. ``bucket_mb`` is DDP's ``bucket_cap_mb``; values are
    fp32 unless they have other ``bytes_per_value``.

    >>> ddp_buckets([(512, 512), (8,), (512, 512)], bucket_mb=1)
    [[(512, 512)], [(8,), (512, 512)]]
    """
    limit_mb = bucket_mb or _FIRST_BUCKET_MB
    buckets: list[list[Shape]] = [[]]
    for shape in reversed(shapes):
        if sum(map(math.prod, buckets[-1])) * bytes_per_value >= limit_mb * 2**20:
            buckets.append([])
            limit_mb = bucket_mb or _DEFAULT_BUCKET_MB
        buckets[-1].append(shape)
    return buckets
