"""The memory of a policy, which a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gradwire.tuning.choices import EncodingChoice
from gradwire.tuning.decisions import Basis, Decision
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.times import UNKNOWN, Times
from gradwire.tuning.trials import MAX_CREDIT, Trial
from gradwire.tuning.units import TuningUnit

Phase = Literal["measure", "try", "keep"]

CHECK_EVERY = 25
"""Steps between two reports of times, each a message of a few bytes."""
FIRST_INTERVAL = 50
"""Steps from the first look at errors to the second, and the most from one that fails to the next."""


@dataclass
class PolicyState:
    """Everything that a policy remembers from step to step and a checkpoint holds."""

    rung: int
    """The rung of the present choice: see `ladder`."""
    phase: Phase = "measure"
    since: int = 0
    """The first step of this phase, or of a trial's window."""
    next_look: int = 0
    next_check: int = 0
    interval: int = FIRST_INTERVAL
    retry: int = 1
    """Steps from a look at gradients that are not finite to the next look."""
    finest: int = 1
    """The fastest rung is not finer than this one, as far as is known."""
    coarsest: int = 0
    """The fastest rung is not coarser than this one; 0 if none was found to be slower."""
    credit: float = MAX_CREDIT
    """The steps' time that trials may still lose."""
    credited: int = 0
    """The step up to which the credit has grown."""
    looking: float = 0.0
    """The part of the time that measuring and deciding has taken, by the last report."""
    num_off: int = 0
    """The number of reports, one after the other, whose step time differs from the first ones."""
    recent: tuple[float, ...] = ()
    """Times of a step with the present choice, by the first reports."""
    times: Times = UNKNOWN
    """Times of the present choice by the last report; a report that follows soon after a resume has none."""
    units: tuple[TuningUnit, ...] = ()
    """The units of the last step. The next one is sampled only if it has the same."""
    used: tuple[bool, ...] = ()
    choice: EncodingChoice | None = None
    """The present choice; None for the encoding that all parameters begin with."""
    table: ErrorTable | None = None
    """The errors of the last look."""
    apart: tuple[str, ...] = ()
    """Parameters that share no block with the one before them, by the last look."""
    trial: Trial | None = None
    decisions: list[Decision] = field(default_factory=list)
    is_scattered: bool = False
    """True if errors and times are those of reduce-scatters."""

    def use(self, step: int, choice: EncodingChoice, rung: int) -> None:
        """Let a choice hold from the step after ``step`` on."""
        self.choice, self.rung, self.since, self.times = choice, rung, step + 1, UNKNOWN
        self.next_check = step + CHECK_EVERY

    def decide(
        self, at: Basis, reason: str, choice: EncodingChoice, rung: int, expected_s: float | None = None
    ) -> Decision:
        """Use a choice, and return the decision for it."""
        self.use(at.step, choice, rung)
        self.decisions.append(at.decide(reason, choice, expected_s, self.looking))
        return self.decisions[-1]

    def expect_steps_of(self, *seconds: float) -> None:
        """Let a step with the present choice usually take so long, as far as is known."""
        self.recent, self.num_off = seconds, 0
