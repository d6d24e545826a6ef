"""Decisions: what was measured, what was chosen, what was expected of it and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwire.tuning.choices import EncodingChoice
from gradwire.tuning.summaries import DecisionSummary
from gradwire.tuning.times import Times


@dataclass(frozen=True)
class Decision:
    """One decision of ``auto``; None for a figure that is not known.

    >>> encodings = {"fc.weight": "int4", "fc.bias": "int4", "head.weight": "int8"}
    >>> decision = Decision(10, "communication shows", 176.6, 118.0, 4e6, encodings, 0.14, 302304, 81.1)
    >>> decision.counts
    {'int4': 2, 'int8': 1}
    """

    step: int
    """The last step before it holds."""
    reason: str
    step_ms: float | None
    """Time of a step before the decision, on the slowest rank."""
    exposed_ms: float | None
    """The part of that time in which ranks did nothing but communicate."""
    bytes_per_s: float | None
    """Bytes a second that a rank sent while buckets were averaged: its link has at least this rate."""
    encodings: Mapping[str, str]
    """The encoding of each parameter from here on."""
    error: float | None
    """The relative error that the budget bounds, with these encodings."""
    bytes_per_step: int
    """Bytes that the busiest rank sends to other nodes in a step with these encodings."""
    expected_ms: float | None
    """Time of a step that was predicted."""
    got_ms: float | None = None
    """Time of a step that was measured afterwards; None before that."""
    looking: float = field(default=0.0, compare=False)
    """The part of the time before the decision that measuring and deciding took."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of parameters of each encoding."""
        return dict(Counter(self.encodings.values()))

    def __str__(self) -> str:
        chosen = ", ".join(f"{encoding} for {count}" for encoding, count in sorted(self.counts.items()))
        told = f"step {self.step}: {self.reason}: {chosen} parameters, {self.bytes_per_step:,} bytes a step"
        if self.error is not None:
            told += f", error {self.error:.2g}"
        if self.expected_ms is not None and self.step_ms is not None:
            told += f"; {self.step_ms:.1f} ms a step, {self.expected_ms:.1f} expected"
        return told

    @property
    def summary(self) -> DecisionSummary:
        """The decision without the names of parameters."""
        return DecisionSummary(
            step=self.step,
            step_ms=self.step_ms,
            exposed_ms=self.exposed_ms,
            expected_ms=self.expected_ms,
            got_ms=self.got_ms,
            error=self.error,
            bytes_per_step=self.bytes_per_step,
            counts=tuple(sorted(self.counts.items())),
            reason=self.reason,
        )


@dataclass(frozen=True)
class Basis:
    """The step, times and bytes that a decision follows from."""

    step: int
    times: Times
    num_bytes: int

    def decide(
        self, reason: str, choice: EncodingChoice, expected_s: float | None, looking: float
    ) -> Decision:
        """Return the decision for a choice, of which steps of ``expected_s`` seconds are expected."""
        known = self.times if self.times.is_known else None
        return Decision(
            step=self.step,
            reason=reason,
            step_ms=None if known is None else to_ms(known.step),
            exposed_ms=None if known is None else to_ms(known.exposed),
            bytes_per_s=None if known is None else self._bytes_per_s,
            encodings=dict(choice.encodings),
            error=choice.error,
            bytes_per_step=choice.num_bytes,
            expected_ms=None if expected_s is None else to_ms(expected_s),
            looking=looking,
        )

    @property
    def _bytes_per_s(self) -> float | None:
        averaging = self.times.averaging
        return float(round(self.num_bytes / averaging)) if averaging else None


def to_ms(seconds: float) -> float:
    """Return seconds as milliseconds, in the accuracy of decisions."""
    return round(1e3 * seconds, 3)
