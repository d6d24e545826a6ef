"""The bucket that a caller gives the engine to average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradwire.buckets import BucketLayout
from gradwire.peers import SealedClaim


@dataclass(frozen=True, eq=False)
class Bucket:
    """Values to average in place, and the parameters they belong to."""

    flat: Tensor
    layout: BucketLayout
    is_last: bool
    """True for the last bucket of a step; no bucket waits any longer then."""
    parameters: Sequence[Tensor] = ()
    """The parameters, in the order of the layout; only stepping and hooks need them."""
    is_shadow: bool = False
    """True if this rank has run out of input, and ``join()`` sends zeros for it."""
    divides_by_active: bool = False
    """True if a mean divides by the number of ranks that still have input."""
    grad_bucket: GradBucket | None = None
    """The bucket as DDP passed it, for a user's hook."""
    weight: float | None = None
    """This rank's weight in a weighted mean; None if all ranks count alike."""
    claim: SealedClaim | None = None
    """A claim that ranks compare before the first message of this bucket, on CPU; None to compare nothing."""
    may_overlap: bool = True
    """False if an earlier bucket under way has a parameter of this one."""
