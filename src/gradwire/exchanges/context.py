"""The context of an exchange: everything it needs beside the values of its bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gradwire.buckets import BucketLayout, Memory
from gradwire.exchanges.scratch import Scratch
from gradwire.ops import Scale
from gradwire.peers import Group


@dataclass(frozen=True)
class Context:
    """The group, step, layout and memory with which one bucket is averaged."""

    group: Group
    scratch: Scratch
    scale: Scale
    """The factor of the sum over ranks: 1/W for a mean over W ranks."""
    layout: BucketLayout
    memory: Memory = field(default_factory=Memory)
    step: int = 0
    may_have_unused: bool = False
    """True if a step may leave parameters unused; DDP drops the averaged gradient of those."""
    step_on_device: Tensor | None = None
    """The step in device memory, if the exchange is recorded; kernels that need it read it there."""
    divisor: float = 1.0
    """By this, the caller divides the result afterwards; residuals are in units of what it then has."""
