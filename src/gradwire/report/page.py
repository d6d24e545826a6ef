"""The HTML page: verdicts first, then charts and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gradwire.headroom import (
    COLUMNS,
    Record,
    describe_proposal,
    give_verdict,
    named_decisions,
    recommend,
    record_notes,
    row_cells,
)
from gradwire.report.charts import (
    Chart,
    comparison_chart,
    decision_chart,
    error_chart,
    link_chart,
    step_chart,
    worker_chart,
)
from gradwire.report.decisions import decision_panel

_STYLE = """
body { font-family: system-ui, sans-serif; line-height: 1.45; color: #24292f }
body { max-width: 1000px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.5rem }
.verdict { background: #f6f8fa; border-left: 5px solid #d55e00; padding: .9rem 1.1rem; font-size: 1.1rem }
.verdict b { display: block; font-size: .95rem; margin-bottom: .3rem }
.chart { margin: 1.5rem 0 } h3 { font-size: 1.05rem; font-weight: 500; margin: .5rem 0 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
td, th { padding: .3rem .9rem; text-align: right } th { font-weight: 600 }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #d0d7de }
.decisions td:nth-last-child(-n+2), .decisions th:nth-last-child(-n+2) { text-align: left }
tr.recommended { background: #fdf0e6; font-weight: 600 }
.conditions, .notes { color: #57606a; font-size: .92rem }
.legend button { border: 0; background: none; font: inherit; cursor: pointer; padding: .15rem .5rem }
select { font: inherit; margin: .3rem 0 }
.wide { overflow-x: auto }
"""
_SPLIT = (
    "Compute: a step without communication. The rest is split in proportion to the time that buckets wait "
    "for other ranks (exposed communication) and the time that they are encoded, summed and decoded "
    "(overhead). Plain DDP does not tell these apart."
)
_FORECAST = (
    "The cost model of <code>gradwire plan</code> carries the measurement above to other links and numbers "
    "of workers, with one worker on each node. Click on a recipe to hide it."
)


def render_page(records: Sequence[Record], names: Sequence[str] = ()) -> str:
    """Return one HTML page about the records of one measurement, or of several files with these names.

    Names from users (models, scripts, files) are shown as text and never run.
    """
    code = (Path(__file__).parent / "draw.js").read_text(encoding="utf-8")
    named = list(zip(names or [record.network for record in records], records, strict=True))
    body = [line for index, (name, record) in enumerate(named) for line in _verdict(index, name, record)]
    if len(names) > 1:
        body += _figure("comparison", comparison_chart(named))
    for index, (name, record) in enumerate(named):
        body += _section(index, name, record)
    charts = [("links", link_chart(records)), ("workers", worker_chart(records))]
    drawn = [(kind, chart) for kind, chart in charts if chart is not None]
    if drawn:
        body += ["<h2>On other networks</h2>", f'<p class="notes">{_FORECAST}</p>']
    for kind, chart in drawn:
        body += _figure(kind, chart)
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>gradwire headroom: {escape(records[0].workload)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            "<h1>Is communication the bottleneck?</h1>",
            *body,
            f"<script>{code}</script></body></html>\n",
        ]
    )


def _verdict(index: int, name: str, record: Record) -> list[str]:
    title = f"<b>{escape(name)}</b>" if name else ""
    text = escape(give_verdict(record))
    return [f'<div class="verdict">{title}<span id="verdict-{index}">{text}</span></div>']


def _section(index: int, name: str, record: Record) -> list[str]:
    lines = [f"<h2>{escape(name)}</h2>"] if name else []
    lines += [
        f'<p class="conditions">{escape(_conditions(record))}</p>',
        *_figure(f"steps-{index}", step_chart(record)),
        f'<p class="notes">{_SPLIT}</p>',
        *_table(record),
        *_proposal(record),
        *_decisions(index, record),
    ]
    errors = error_chart(record)
    return lines + (_figure(f"errors-{index}", errors) if errors is not None else [])


def _proposal(record: Record) -> list[str]:
    """Return a panel about what recipe ``auto`` would send, or why that is unknown, if somebody asked."""
    said = describe_proposal(record)
    if not said:
        return []
    panel = [f'<div class="verdict"><b>auto</b><span>{escape(said)}</span></div>']
    if record.proposal is None:
        return panel
    rows = "".join(
        f"<tr><td>{escape(encoding)}</td><td>{count}</td></tr>" for encoding, count in record.proposal.counts
    )
    return [*panel, f"<table><tr><th>encoding</th><th>parameters</th></tr>{rows}</table>"]


def _decisions(index: int, record: Record) -> list[str]:
    """Return a panel for each model that recipe ``auto`` has decided about."""
    lines = []
    for number, (name, decisions) in enumerate(named_decisions(record)):
        lines += decision_panel(name, decisions)
        chart = decision_chart(decisions)
        lines += _figure(f"decisions-{index}-{number}", chart) if chart is not None else []
    return lines


def _conditions(record: Record) -> str:
    link = f", {record.network}" if record.network else ""
    return (
        f"{record.workload}; {record.world_size} ranks over {record.backend} on {record.device}{link}; "
        f"{record.machine}; torch {record.torch_version}, gradwire {record.gradwire_version}; {record.date}"
    )


def _table(record: Record) -> list[str]:
    lines = ['<div class="wide"><table><tr>' + "".join(f"<th>{title}</th>" for title in COLUMNS) + "</tr>"]
    use = recommend(record)
    for row in record.rows:
        kind = ' class="recommended"' if row == use else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row_cells(record, row))
        lines.append(f"<tr{kind}>{cells}</tr>")
    return [
        *lines,
        "</table></div>",
        f'<p class="notes">{"<br>".join(map(escape, record_notes(record)))}</p>',
    ]


def _figure(name: str, chart: Chart) -> list[str]:
    # A browser ends a script element at the first "</", even within a string.
    text = json.dumps(chart, allow_nan=False).replace("<", "\\u003c")
    return [
        f'<div class="chart" id="{name}"></div>',
        f'<script type="application/json" class="figure" data-target="{name}">{text}</script>',
    ]
