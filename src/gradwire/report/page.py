"""The page: verdicts on top, then charts and tables."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from html import escape

from rich.filesize import decimal

from gradwire.headroom.records import Record
from gradwire.headroom.verdict import give_verdict
from gradwire.report.charts import Chart, comparison_chart, error_chart, link_chart, step_chart, worker_chart

_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem }
body { color: #24292f }
.verdict { background: #f6f8fa; border-left: 5px solid #e07a5f; padding: 1rem; font-size: 1.15rem }
.chart { height: 420px; margin: 1rem 0 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #d0d7de }
.conditions { color: #57606a }
"""
_DRAW = """
for (const source of document.querySelectorAll("script.figure")) {
  const figure = JSON.parse(source.textContent);
  Plotly.newPlot(source.dataset.target, figure.data, figure.layout, {responsive: true, displaylogo: false});
}
"""


class ReportUnavailable(RuntimeError):
    """Plotly, which draws the charts, is not installed."""


def check_plotly() -> None:
    """Raise `ReportUnavailable` if a page could not be made."""
    if importlib.util.find_spec("plotly") is None:
        raise ReportUnavailable("the page's charts need plotly: pip install 'gradwire[report]'")


def render_page(records: Sequence[Record], names: Sequence[str] = ()) -> str:
    """One HTML page about the records, which are of a sweep, or of several files with these names.

    Whatever users named (models, scripts, files) is shown as it is, and nothing of it is run. Raises
    `ReportUnavailable` without plotly.
    """
    check_plotly()
    from plotly.offline import get_plotlyjs

    body: list[str] = []
    for index, record in enumerate(records):
        name = names[index] if names else record.link or ""
        body += _section(index, record, name)
    if len(names) > 1:
        chart = comparison_chart(list(zip(names, records, strict=True)))
        body = [*_figure("comparison", chart), *body]
    for kind, chart_or_none in (("links", link_chart(records)), ("workers", worker_chart(records))):
        if chart_or_none is not None:
            body += _figure(kind, chart_or_none)
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f"<title>gradwire headroom: {escape(records[0].workload)}</title>",
            f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
            "<h1>Is communication the bottleneck?</h1>",
            *body,
            f"<script>{_DRAW}</script></body></html>\n",
        ]
    )


def _section(index: int, record: Record, name: str) -> list[str]:
    lines = [f"<h2>{escape(name)}</h2>"] if name else []
    lines += [
        f'<p class="verdict" id="verdict-{index}">{escape(give_verdict(record))}</p>',
        f'<p class="conditions">{escape(_conditions(record))}</p>',
        *_figure(f"steps-{index}", step_chart(record)),
        *_table(record),
    ]
    errors = error_chart(record)
    return lines + (_figure(f"errors-{index}", errors) if errors is not None else [])


def _conditions(record: Record) -> str:
    link = "" if record.link is None else f", links of {record.link}"
    how = "taking turns" if record.interleaved else "one after the other"
    return (
        f"{record.workload}; {record.world_size} ranks over {record.backend} on {record.device}{link}; "
        f"{record.machine}; torch {record.torch_version}, gradwire {record.gradwire_version}; {record.date}; "
        f"median of {len(record.allreduce.samples_ms)} steps, {how}"
    )


def _table(record: Record) -> list[str]:
    titles = ("recipe", "step ms", "p10-p90", "sent per step", "gain", "gradient error")
    lines = ["<table><tr>" + "".join(f"<th>{title}</th>" for title in titles) + "</tr>"]
    for row in record.rows:
        low, high = row.spread_ms
        cells = (
            record.label(row),
            f"{row.step_ms:.1f}",
            f"{low:.1f}-{high:.1f}",
            "unknown" if row.bytes_per_step is None else decimal(row.bytes_per_step),
            f"{record.gain(row):.2f}x",
            "" if row.gradient_error is None else f"{row.gradient_error:.1e}",
        )
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return [*lines, "</table>"]


def _figure(name: str, chart: Chart) -> list[str]:
    # A script element ends at the first "</", wherever that stands.
    text = json.dumps(chart, allow_nan=False).replace("<", "\\u003c")
    return [
        f'<div class="chart" id="{name}"></div>',
        f'<script type="application/json" class="figure" data-target="{name}">{text}</script>',
    ]
