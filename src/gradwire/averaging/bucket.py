"""The bucket that a caller gives the engine to average."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.buckets import BucketLayout


@dataclass(frozen=True, eq=False)
class Bucket:
    """Values to average in place, and their layout."""

    flat: Tensor
    layout: BucketLayout
    is_last: bool
    """True for the last bucket of a step; no bucket waits any longer then."""
    is_active: bool | None = None
    """None for a mean over all ranks; else the mean is over the ranks that say True."""
