"""Buckets: what a caller gives the engine to average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradwire.buckets import BucketLayout


@dataclass(frozen=True, eq=False)
class Bucket:
    """Values to average in place, and the parameters they belong to."""

    flat: Tensor
    layout: BucketLayout
    is_last: bool
    """True for the last bucket of a step: those that wait for others are then exchanged."""
    parameters: Sequence[Tensor] = ()
    is_shadow: bool = False
    """True if ``join()`` feeds zeros for a rank that has run out of input."""
    divides_by_active: bool = False
    """True if a mean is over the ranks that still have input."""
    grad_bucket: GradBucket | None = None
    """The bucket as DDP passed it, for hooks of the user's."""
