"""The page's charts, as the values that plotly draws.

Plotly takes tags in texts for markup, so whatever a user named goes through `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from gradwire.headroom.records import NOOP, Record
from gradwire.lab import format_rate
from gradwire.planner import Cluster, predict
from gradwire.planner.from_records import bits_per_s, calibration_of

Chart = dict[str, Any]

_COMPUTE, _EXPOSED, _OVERHEAD = "#8da9c4", "#e07a5f", "#f2cc8f"
_RATES = [10.0**exponent for exponent in (7, 7.5, 8, 8.5, 9, 9.5, 10, 10.5, 11)]
_WORKERS = [2**k for k in range(1, 13)]


def plain(text: str) -> str:
    """The text, shown as it is."""
    return escape(text, quote=False)


def step_chart(record: Record) -> Chart:
    """Step time per recipe, split in compute, exposed communication and overhead."""
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
    layout = _layout("Step time", "ms", None)
    layout.update(barmode="stack")
    layout["legend"]["traceorder"] = "normal"
    layout["yaxis"].update(autorange="reversed")
    return {"data": bars, "layout": layout}


def error_chart(record: Record) -> Chart | None:
    """Gradient error against bytes; None where neither is known."""
    # Buckets of another size hardly change either.
    rows = [row for row in record.recipes if row.bucket_mb == record.bucket_mb and row.bytes_per_step]
    rows = [row for row in rows if row.gradient_error is not None]
    if not rows:
        return None
    points = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [row.bytes_per_step for row in rows],
        # Zero has no place on a logarithmic axis.
        "y": [max(row.gradient_error or 0.0, 1e-9) for row in rows],
        "text": [plain(record.label(row)) for row in rows],
        "textposition": "top center",
        "marker": {"size": 11, "color": _EXPOSED},
        "hovertemplate": "%{text}: %{x:.3s}B a step, relative error %{y:.2e}<extra></extra>",
    }
    layout = _layout("Gradient error against bytes", "bytes sent per step and rank", "relative error")
    layout["xaxis"].update(type="log")
    layout["yaxis"].update(type="log", exponentformat="power")
    return {"data": [points], "layout": layout}


def link_chart(records: Sequence[Record]) -> Chart | None:
    """Predicted step time over the rate of links, with what was measured."""
    base = records[0]
    n = base.world_size
    lines = _predictions(
        base, [(rate, Cluster(n, 1, rate, cores_per_worker=_cores(base))) for rate in _RATES]
    )
    if not lines:
        return None
    for record in records:
        rate = bits_per_s(record)
        if rate is not None:
            lines.append(_measured(record, rate))
    layout = _layout(f"Prediction over link speed, {n} workers", "bit/s of each worker's link", "step, ms")
    layout["xaxis"].update(type="log", tickvals=_RATES[::2], ticktext=[format_rate(r) for r in _RATES[::2]])
    layout["yaxis"].update(type="log")
    return {"data": lines, "layout": layout}


def worker_chart(records: Sequence[Record]) -> Chart | None:
    """Predicted step time over the number of workers, with what was measured."""
    base = records[0]
    rate = bits_per_s(base) or 1e9
    lines = _predictions(base, [(n, Cluster(n, 1, rate)) for n in _WORKERS])
    if not lines:
        return None
    for record in records:
        if bits_per_s(record) == rate:
            lines.append(_measured(record, record.world_size))
    layout = _layout(f"Prediction over workers, links of {format_rate(rate)}", "workers", "step, ms")
    layout["xaxis"].update(type="log", tickvals=_WORKERS, ticktext=[str(n) for n in _WORKERS])
    layout["yaxis"].update(type="log")
    return {"data": lines, "layout": layout}


def comparison_chart(named: Sequence[tuple[str, Record]]) -> Chart:
    """Step times of several files, side by side."""
    bars = [
        {
            "type": "bar",
            "name": plain(name),
            "x": [plain(record.label(row)) for row in record.rows],
            "y": [round(row.step_ms, 2) for row in record.rows],
            "hovertemplate": f"{plain(name)}, %{{x}}: %{{y:.1f}} ms<extra></extra>",
        }
        for name, record in named
    ]
    return {"data": bars, "layout": _layout("Step time, file by file", None, "ms")}


def _cores(record: Record) -> float:
    return record.machine.num_cores / record.world_size if record.one_machine else 2.0


def _predictions(record: Record, clusters: Sequence[tuple[float, Cluster]]) -> list[dict[str, Any]]:
    calibration = calibration_of(record)
    compute_s = record.noop.step_ms / 1e3
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plain(recipe),
            "x": [x for x, _ in clusters],
            "y": [
                round(
                    1e3 * predict(recipe, record.gradient_bytes // 4, compute_s, cluster, calibration).step_s,
                    3,
                )
                for _, cluster in clusters
            ],
            "hovertemplate": f"{plain(recipe)}, predicted: %{{y:.1f}} ms<extra></extra>",
        }
        for recipe in calibration.costs
    ]


def _measured(record: Record, x: float) -> dict[str, Any]:
    rows = [row for row in record.rows if row.recipe != NOOP and row.bucket_mb == record.bucket_mb]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"measured{'' if record.link is None else ' at ' + plain(record.link)}",
        "x": [x for _ in rows],
        "y": [row.step_ms for row in rows],
        "text": [plain(record.label(row)) for row in rows],
        "marker": {"size": 9, "symbol": "diamond", "color": "#24292f"},
        "hovertemplate": "%{text}, measured: %{y:.1f} ms<extra></extra>",
    }


def _layout(title: str, x: str | None, y: str | None) -> dict[str, Any]:
    return {
        "title": {"text": title},
        "xaxis": {"title": {"text": x or ""}, "automargin": True},
        "yaxis": {"title": {"text": y or ""}, "automargin": True},
        "legend": {"orientation": "h", "y": -0.25},
        "margin": {"t": 50},
    }
