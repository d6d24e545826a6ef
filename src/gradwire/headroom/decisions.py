"""The decisions of recipe ``auto`` in a record: taken from wires, and told in a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.filesize import decimal

from gradwire.ddp import Wire
from gradwire.headroom.records import Record
from gradwire.tuning import DecisionSummary


def decisions_of(wires: Iterable[Wire]) -> tuple[tuple[DecisionSummary, ...], ...]:
    """Return the decisions for each model that has some; none for recipes other than ``auto``."""
    found = (tuple(each.summary for each in wire.decisions()) for wire in wires)
    return tuple(decisions for decisions in found if decisions)


def named_decisions(record: Record) -> Iterator[tuple[str, tuple[DecisionSummary, ...]]]:
    """Yield the decisions for each model, with the name of its row, and of the model if there are several."""
    for row in record.rows:
        for number, decisions in enumerate(row.decisions, start=1):
            model = f", model {number}" if len(row.decisions) > 1 else ""
            yield f"{record.label(row)}{model}", decisions


def describe_decisions(record: Record) -> list[str]:
    """Say in a line for each model what ``auto`` ended with; no lines if it was not measured."""
    lines = []
    for name, decisions in named_decisions(record):
        last = decisions[-1]
        chosen = ", ".join(f"{count} {encoding}" for encoding, count in last.counts)
        error = "" if last.error is None else f", error {last.error:.2g}"
        sent = decimal(last.bytes_per_step)
        lines.append(f"{name}: {chosen} after {last.step + 1} steps, {sent} a step{error}")
    return lines
