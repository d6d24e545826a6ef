"""The panel of the page about the decisions of recipe ``auto``: a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gradwire.tuning import DecisionSummary

_COLUMNS = (
    "step",
    "ms a step",
    "exposed ms",
    "expected ms",
    "got ms",
    "error",
    "bytes a step",
    "parameters by encoding",
    "why",
)
_NOTE = (
    "Step: the last one before the decision holds. Exposed: the part of a step that communication adds. "
    "Expected, got: a step with the new encodings, as predicted and as measured. Error: relative, what the "
    "budget bounds. Bytes: from the busiest rank."
)


def decision_panel(name: str, decisions: Sequence[DecisionSummary]) -> list[str]:
    """Return a table of the decisions of recipe ``name``, a line for each."""
    titles = "".join(f"<th>{title}</th>" for title in _COLUMNS)
    lines = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in decision.cells) + "</tr>"
        for decision in decisions
    ]
    return [
        f"<h3>What {escape(name)} decided</h3>",
        f'<div class="wide"><table class="decisions"><tr>{titles}</tr>',
        *lines,
        "</table></div>",
        f'<p class="notes">{_NOTE}</p>',
    ]
