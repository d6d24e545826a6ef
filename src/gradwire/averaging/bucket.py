"""The bucket that a caller gives the engine to average."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges import Exchange
from gradwire.peers import SealedClaim


@dataclass(frozen=True, eq=False)
class Bucket:
    """Values to average in place, and their layout."""

    flat: Tensor
    layout: BucketLayout
    is_last: bool
    """True for the last bucket of a step; no bucket waits any longer then."""
    is_active: bool | None = None
    """None for a mean over all ranks; else the mean is over the ranks that say True."""
    weight: float | None = None
    """This rank's weight in a weighted mean; None if all ranks count alike."""
    claim: SealedClaim | None = None
    """A claim that ranks compare before the first message of this bucket, on CPU; None to compare nothing."""
    exchange: Exchange | None = None
    """The way to average it; None for that of the engine's recipe."""
    factor: float | None = None
    """The factor of the sum over ranks; None for that of the recipe: 1/W for a mean, 1 for a sum."""
    divisor: float = 1.0
    """By this, the caller divides the result afterwards; residuals are in units of what it then has."""
    may_overlap: bool = True
    """False if an earlier bucket under way has a parameter of this one."""
