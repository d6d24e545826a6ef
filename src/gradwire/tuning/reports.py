"""Reports: what all ranks have measured in a step, the same on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.times import Times, combine

Want = Literal["nothing", "times", "errors"]
"""What a report is to have: times and used units, or errors as well."""


@dataclass(frozen=True)
class StepReport:
    """Measurements of all ranks together, the same on every rank."""

    times: Times
    used: tuple[bool, ...]
    """For each unit, True if any rank has a gradient in it."""
    table: ErrorTable | None = None
    looking: float = 0.0
    """The part of the time so far that measuring and deciding has taken."""

    @property
    def is_finite(self) -> bool:
        table = self.table
        return table is None or all(
            map(math.isfinite, [*table.norms, *(e for row in table.errors for e in row)])
        )

    def to_json(self) -> str:
        """Return the report as JSON, to send it to other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepReport:
        """Return the report that `to_json` has written."""
        found = json.loads(text)
        table = None if found["table"] is None else ErrorTable(**found["table"])
        return cls(Times(**found["times"]), tuple(found["used"]), table, found["looking"])


def to_row(times: Times, looking: float, used: Sequence[bool], table: ErrorTable | None) -> list[float]:
    """Return what one rank has measured as numbers, to exchange them with other ranks."""
    row = [times.step, times.exposed, times.averaging, looking, *map(float, used)]
    return row if table is None else [*row, *table.norms, *(error for own in table.errors for error in own)]


def from_rows(ranks: Sequence[Sequence[float]], num_units: int, *, has_table: bool) -> StepReport:
    """Return the report of all ranks, from the numbers of each; errors are those of rank 0.

    They are the same on every rank, unless kernels differ.
    """
    begin = 4 + num_units
    table = None
    if has_table:
        norms, errors = ranks[0][begin : begin + num_units], ranks[0][begin + num_units :]
        width = len(errors) // num_units
        rows = [list(errors[width * unit : width * (unit + 1)]) for unit in range(num_units)]
        table = ErrorTable(list(norms), rows)
    return StepReport(
        combine([Times(*row[:3]) for row in ranks]),
        combine_used([[each > 0 for each in row[4:begin]] for row in ranks]),
        table,
        max(row[3] for row in ranks),
    )


def combine_used(ranks: Sequence[Sequence[bool]]) -> tuple[bool, ...]:
    """Return, for each unit, True if it is used on any rank."""
    return tuple(map(any, zip(*ranks, strict=True)))


def combine_reports(reports: Sequence[StepReport]) -> StepReport:
    """Return the report of groups of ranks that average different parts of the same parameters."""
    tables = [report.table for report in reports if report.table is not None]
    table = None
    if tables:
        rows = zip(*(each.errors for each in tables), strict=True)
        table = ErrorTable(
            [math.fsum(norms) for norms in zip(*(each.norms for each in tables), strict=True)],
            [[math.fsum(errors) for errors in zip(*parts, strict=True)] for parts in rows],
        )
    return StepReport(
        combine([report.times for report in reports]),
        combine_used([report.used for report in reports]),
        table,
        max(report.looking for report in reports),
    )
