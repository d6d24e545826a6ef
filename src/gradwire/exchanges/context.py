"""What an exchange works with beside the values of its bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradwire.buckets import BucketLayout, Memory
from gradwire.exchanges.scratch import Scratch
from gradwire.ops import Scale
from gradwire.peers import Group


@dataclass(frozen=True)
class Context:
    """One bucket's place in the run: with whom, in which step, with which memory."""

    group: Group
    scratch: Scratch
    scale: Scale
    """What the sum over ranks is multiplied with: 1/W for a mean."""
    layout: BucketLayout
    memory: Memory = field(default_factory=Memory)
    step: int = 0
    may_skip: bool = False
    """Whether parameters may have no gradient in a step, so that DDP drops what we make of theirs."""
