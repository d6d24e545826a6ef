"""The charts of the page, as the traces and layouts that ``draw.js`` draws.

They are a part of what plotly reads, so that other programs can draw them too. Plotly takes tags in texts for
markup: every name from a user goes through `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from gradwire.headroom import Record
from gradwire.links import format_rate
from gradwire.planner import Cluster, Forecast, cores_per_worker, link_bits_per_s
from gradwire.tuning import DecisionSummary

Chart = dict[str, Any]

# The colors of Okabe and Ito, which colour-blind people can tell apart. Beyond eight recipes, dashes tell.
_COMPUTE, _EXPOSED, _OVERHEAD = "#56b4e9", "#d55e00", "#e69f00"
_INK, _GRID = "#24292f", "#e6e9ec"
# One color per recipe, the same in all charts.
_LINES = ("#24292f", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")
_DASHES = ("solid", "dash", "dashdot")
_RATES = [10.0**exponent for exponent in (7, 7.5, 8, 8.5, 9, 9.5, 10, 10.5, 11)]
_NO_LIMIT = 10.0**11.5
"""Place of links without a limit on the axis of rates."""
_WORKERS = [2**k for k in range(1, 13)]
_OTHER_RATES = (1e8, 1e9, 1e10)
_DECADES = {"dtick": 1, "minor": {"dtick": "D1", "showgrid": True, "gridcolor": "#f3f4f6"}}


def plain(text: str) -> str:
    """Return the text such that it is shown as it is."""
    return escape(text, quote=False)


def step_chart(record: Record) -> Chart:
    """Chart the step time of each row, split into compute, exposed communication and overhead."""
    labels = [plain(record.label(row)) for row in record.rows]
    splits = [record.split_ms(row) for row in record.rows]
    parts = (("compute", _COMPUTE), ("exposed communication", _EXPOSED), ("overhead", _OVERHEAD))
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": [round(split[i], 2) for split in splits],
            "marker": {"color": color},
            "hovertemplate": f"%{{y}}: %{{x:.1f}} ms {name}<extra></extra>",
        }
        for i, (name, color) in enumerate(parts)
    ]
    totals = {
        "type": "scatter",
        "mode": "text",
        "y": labels,
        "x": [row.step_ms for row in record.rows],
        "text": [f" {row.step_ms:.1f} ms, {record.gain(row):.2f}x" for row in record.rows],
        "textposition": "middle right",
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
    layout = _layout("Step time by part", "ms", None)
    layout.update(barmode="stack", bargap=0.3, height=170 + 30 * len(labels))
    layout["legend"].update(traceorder="normal", y=1.02, yanchor="bottom", x=0)
    layout["xaxis"].update(range=[0, 1.25 * max(row.step_ms for row in record.rows)])
    layout["yaxis"].update(autorange="reversed", showgrid=False)
    layout["margin"].update(t=90)
    return {"data": [*bars, totals], "layout": layout}


def error_chart(record: Record) -> Chart | None:
    """Chart the gradient error over the bytes sent; None if neither is known."""
    # Another bucket size changes neither by much.
    rows = [row for row in record.recipes if row.bucket_mb == record.bucket_mb and row.bytes_per_step]
    rows = [row for row in rows if row.gradient_error is not None]
    if not rows:
        return None
    colors = _colors(record)
    points = [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": plain(record.label(row)),
            "x": [row.bytes_per_step],
            # A logarithmic axis has no zero.
            "y": [max(row.gradient_error or 0.0, 1e-8)],
            "text": [plain(record.label(row))],
            # Texts of recipes with the same number of bytes would overlap.
            "textposition": "bottom center" if index % 2 else "top center",
            "marker": {"size": 12, "color": colors[row.recipe]},
            "hovertemplate": f"{plain(record.label(row))}: %{{x:.3s}}B a step, relative error %{{y:.2g}}"
            "<extra></extra>",
        }
        for index, row in enumerate(rows)
    ]
    layout = _layout(
        "Bytes sent, and error of a step's gradient", "bytes sent per step and rank", "relative error"
    )
    layout.update(showlegend=False)
    layout["xaxis"].update(type="log", exponentformat="SI", ticksuffix="B", **_DECADES)
    layout["yaxis"].update(type="log", exponentformat="power", dtick=2, range=[-9, 0.6])
    return {"data": points, "layout": layout}


def link_chart(records: Sequence[Record]) -> Chart | None:
    """Chart the predicted step time over the rate of links, with the measured ones."""
    base = records[0]
    if base.world_size == 1:
        return None
    clusters = [(rate, _cluster(base, base.world_size, rate)) for rate in _RATES]
    lines = _predictions(base, [*clusters, (_NO_LIMIT, _cluster(base, base.world_size, None))])
    for record in records:
        if (record.workload, record.world_size) == (base.workload, base.world_size):
            lines += _measured(record, link_bits_per_s(record) or _NO_LIMIT)
    title = f"Predicted over link speed, {base.world_size} workers; diamonds were measured"
    layout = _layout(title, "rate of each worker's link", "step time")
    layout["xaxis"].update(
        type="log",
        tickvals=[*_RATES[::2], _NO_LIMIT],
        ticktext=[*(format_rate(rate) for rate in _RATES[::2]), "no limit"],
    )
    layout["yaxis"].update(type="log", ticksuffix=" ms", **_DECADES)
    return {"data": lines, "layout": layout}


def worker_chart(records: Sequence[Record]) -> Chart | None:
    """Chart the predicted step time over the number of workers, with a menu to choose the links."""
    base = records[0]
    if base.world_size == 1:
        return None
    rates = [link_bits_per_s(base), *(rate for rate in _OTHER_RATES if rate != link_bits_per_s(base))]
    traces: list[dict[str, Any]] = []
    shown: list[list[bool]] = []
    for rate in rates:
        lines = _predictions(base, [(n, _cluster(base, n, rate)) for n in _WORKERS])
        for record in records:
            if (record.workload, link_bits_per_s(record)) == (base.workload, rate):
                lines += _measured(record, record.world_size)
        shown.append([False] * len(traces) + [True] * len(lines))
        traces += [{**line, "visible": rate == rates[0]} for line in lines]
    layout = _layout("Predicted over workers; diamonds were measured", "workers", "step time")
    layout["updatemenus"] = [
        {
            "buttons": [
                {
                    "label": "links without a limit" if rate is None else f"links of {format_rate(rate)}",
                    "method": "update",
                    "args": [{"visible": flags + [False] * (len(traces) - len(flags))}],
                }
                for rate, flags in zip(rates, shown, strict=True)
            ],
            "x": 1,
            "xanchor": "right",
            "y": 1.02,
            "yanchor": "bottom",
        }
    ]
    layout["xaxis"].update(type="log", tickvals=_WORKERS, ticktext=[str(n) for n in _WORKERS])
    layout["yaxis"].update(type="log", ticksuffix=" ms", **_DECADES)
    return {"data": traces, "layout": layout}


def comparison_chart(named: Sequence[tuple[str, Record]]) -> Chart:
    """Chart the step times of several files side by side."""
    bars = [
        {
            "type": "bar",
            "name": plain(name),
            "x": [plain(record.label(row)) for row in record.rows],
            "y": [round(row.step_ms, 2) for row in record.rows],
            "marker": {"color": _LINES[(number + 1) % len(_LINES)]},
            "hovertemplate": f"{plain(name)}, %{{x}}: %{{y:.1f}} ms<extra></extra>",
        }
        for number, (name, record) in enumerate(named)
    ]
    return {"data": bars, "layout": _layout("Step time, file by file", None, "ms")}


def decision_chart(decisions: Sequence[DecisionSummary]) -> Chart | None:
    """Chart the ms a step around each decision; None if there are fewer than two, or no times."""
    series = {
        "before": [(each.step, each.step_ms) for each in decisions],
        "expected": [(each.step, each.expected_ms) for each in decisions],
        "got": [(each.step, each.got_ms) for each in decisions],
    }
    colors = dict(zip(series, (_INK, _COMPUTE, _EXPOSED), strict=True))
    known = {name: [(x, y) for x, y in points if y is not None] for name, points in series.items()}
    marks = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [x for x, _ in points],
            "y": [y for _, y in points],
            "marker": {"size": 10, "color": colors[name]},
            "hovertemplate": f"step %{{x}}: %{{y:.1f}} ms a step {name}<extra></extra>",
        }
        for name, points in known.items()
        if points
    ]
    if len(decisions) < 2 or not marks:
        return None
    layout = _layout("Time of a step, by decision", "step of the decision", "ms a step")
    layout.update(height=280)
    return {"data": marks, "layout": layout}


def _colors(record: Record) -> dict[str, str]:
    names = dict.fromkeys(row.recipe for row in record.rows)
    return {name: _LINES[index % len(_LINES)] for index, name in enumerate(names)}


def _dash(record: Record, recipe: str) -> str:
    names = list(dict.fromkeys(row.recipe for row in record.rows))
    return _DASHES[names.index(recipe) // len(_LINES) % len(_DASHES)]


def _cluster(record: Record, num_workers: int, rate: float | None) -> Cluster:
    """Return a cluster of nodes with one worker, which has as many cores as each rank of the record."""
    return Cluster(num_workers, 1, rate, cores_per_worker=cores_per_worker(record))


def _predictions(record: Record, clusters: Sequence[tuple[float, Cluster]]) -> list[dict[str, Any]]:
    forecast, colors = Forecast(record), _colors(record)
    lines = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plain(row.recipe),
            "legendgroup": plain(row.recipe),
            "x": [x for x, _ in clusters],
            "y": [round(forecast.step_ms(row, cluster), 3) for _, cluster in clusters],
            "line": {"color": colors[row.recipe], "width": 2, "dash": _dash(record, row.recipe)},
            "hovertemplate": f"{plain(row.recipe)}, predicted: %{{y:.1f}} ms<extra></extra>",
        }
        for row in forecast.recipes
    ]
    alone = {
        "type": "scatter",
        "mode": "lines",
        "name": "compute alone",
        "x": [x for x, _ in clusters],
        "y": [record.noop.step_ms for _ in clusters],
        "line": {"color": _COMPUTE, "width": 2, "dash": "dot"},
        "hovertemplate": "without communication: %{y:.1f} ms<extra></extra>",
    }
    return [*lines, alone]


def _measured(record: Record, x: float) -> list[dict[str, Any]]:
    rows, colors = Forecast(record).recipes, _colors(record)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{plain(row.recipe)}, measured",
            "legendgroup": plain(row.recipe),
            "showlegend": False,
            "x": [x],
            "y": [row.step_ms],
            "marker": {
                "size": 11,
                "symbol": "diamond",
                "color": colors[row.recipe],
                "line": {"color": "white", "width": 1},
            },
            "hovertemplate": f"{plain(row.recipe)}, measured: %{{y:.1f}} ms<extra></extra>",
        }
        for row in rows
    ]


def _layout(title: str, x: str | None, y: str | None) -> dict[str, Any]:
    axis = {"automargin": True, "gridcolor": _GRID, "zeroline": False}
    return {
        "title": {"text": title, "x": 0, "xanchor": "left", "font": {"size": 17}},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": _INK},
        "height": 460,
        "plot_bgcolor": "white",
        "xaxis": {"title": {"text": x or ""}, **axis},
        "yaxis": {"title": {"text": y or ""}, **axis},
        "legend": {"orientation": "h", "y": -0.25},
        "margin": {"t": 60, "l": 20, "r": 20, "b": 60},
        "hoverlabel": {"font": {"size": 13}},
    }
