"""The input and the memory of a policy: reports, trials, and the state that a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gradwire.tuning.choices import EncodingChoice
from gradwire.tuning.decisions import Decision
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.times import UNKNOWN, Times

Want = Literal["nothing", "times", "errors"]
Phase = Literal["measure", "try", "keep"]

FIRST_INTERVAL = 50
"""Steps from the first look at errors to the second."""


@dataclass(frozen=True)
class StepReport:
    """Measurements of all ranks together, the same on every rank."""

    times: Times
    used: tuple[bool, ...]
    """For each unit, True if any rank has a gradient in it."""
    table: ErrorTable | None = None

    @property
    def is_finite(self) -> bool:
        table = self.table
        return table is None or all(
            map(math.isfinite, [*table.norms, *(e for row in table.errors for e in row)])
        )


@dataclass(frozen=True)
class Trial:
    """A trial under way: what it began with, and the choices that have been tried."""

    table: ErrorTable
    times: Times
    """Times before the trial."""
    num_bytes: int
    """Bytes of a step before the trial."""
    tried: Mapping[int, float]
    """Time of a step, by the number of encodings that a choice was made from."""


@dataclass
class PolicyState:
    """Everything that a policy remembers from step to step and a checkpoint holds."""

    phase: Phase = "measure"
    since: int = 0
    """The first step of this phase."""
    next_look: int = 0
    interval: int = FIRST_INTERVAL
    num_allowed: int = 1
    """The number of encodings that the present choice was made from."""
    limit: int = 0
    """The number of encodings that choices are made from: coarser ones were slower. 0 for all."""
    stays_coarse: bool = False
    """True if the finest encoding was tried again, and was slower."""
    num_off: int = 0
    used: tuple[bool, ...] = ()
    settled: Times = UNKNOWN
    """The times of the present choice."""
    choice: EncodingChoice | None = None
    """The present choice; None for the finest encoding."""
    trial: Trial | None = None
    decisions: list[Decision] = field(default_factory=list)
