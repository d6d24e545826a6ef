"""Summaries of decisions: the figures that tables show, a line for each decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DecisionSummary:
    """One decision of ``auto``, with the number of parameters by encoding; None for an unknown figure.

    `Decision` has the encoding of each parameter too.
    """

    step: int
    """The last step before it holds."""
    step_ms: float | None
    """Time of a step before the decision, on the slowest rank."""
    exposed_ms: float | None
    """The part of that time in which ranks did nothing but communicate."""
    expected_ms: float | None
    """Time of a step that was predicted."""
    got_ms: float | None
    """Time of a step that was measured afterwards; None before that."""
    error: float | None
    """The relative error that the budget bounds, with the new encodings."""
    bytes_per_step: int
    """Bytes that the busiest rank sends to other nodes in a step with the new encodings."""
    counts: tuple[tuple[str, int], ...]
    """The number of parameters of each encoding."""
    reason: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of a table's columns, in the order of the fields."""
        counts = " ".join(f"{encoding}:{count}" for encoding, count in self.counts)
        times = (self.step_ms, self.exposed_ms, self.expected_ms, self.got_ms)
        error = "-" if self.error is None else f"{self.error:.2g}"
        return str(self.step), *map(_ms, times), error, f"{self.bytes_per_step:,}", counts, self.reason


_TITLES = ("step", "ms a step", "exposed", "expected", "got", "error", "bytes", "encodings", "why")


def decision_table(summaries: Sequence[DecisionSummary]) -> str:
    """Return decisions as a table, a line for each."""
    rows = [_TITLES, *(each.cells for each in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    last = len(_TITLES) - 2  # texts, on the left
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column >= last else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
