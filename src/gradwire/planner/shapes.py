"""Shapes of models, and of the buckets that DDP cuts them into. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Shape = tuple[int, ...]

_DEFAULT_BUCKET_MB = 25.0
# Unless a size is asked for, DDP's first bucket is small, so that communication starts early.
_FIRST_BUCKET_MB = 1.0


def typical_shapes(num_parameters: int) -> list[Shape]:
    """Return the shapes of a transformer with that many parameters.

    It has one layer for each 64 of width, as models of that size do. A layer has four matrices of
    width x width, three of them in one, and two of four times that size. The last matrix is cut short.

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


def layers_of(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Return the shapes of `typical_shapes` layer by layer.

    >>> [len(layer) for layer in layers_of(typical_shapes(19_000_000))]
    [4, 4, 4, 4, 4, 4, 4, 3]
    """
    return [list(shapes[start : start + 4]) for start in range(0, len(shapes), 4)]


def ddp_buckets(
    shapes: Sequence[Shape], bucket_mb: float | None = None, bytes_per_value: float = 4
) -> list[list[Shape]]:
    """Return the shapes in each bucket, in the order in which a backward pass produces the buckets.

    The parameter that fills a bucket closes it. ``bucket_mb`` is DDP's ``bucket_cap_mb``.

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
