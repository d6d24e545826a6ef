"""A bucket of DDP's, as runners take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.averaging import Bucket
from gradwire.torch_private import GradBucket


@dataclass(frozen=True, eq=False)
class DDPBucket(Bucket):
    """A bucket with its parameters, in the order of the layout, and the object that a user's hook takes."""

    parameters: Sequence[Tensor] = ()
    is_shadow: bool = False
    """True if this rank has run out of input, and ``join()`` sends zeros for it."""
    closes_pass: bool = False
    """True for one bucket of a backward pass: the one at which work for after the pass is queued."""
    grad_bucket: GradBucket | None = None
