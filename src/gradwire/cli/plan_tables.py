"""Predictions and comparisons as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from gradwire.headroom import OuterPrediction
from gradwire.planner import Cluster, Comparison, Prediction


class PlannedRow(NamedTuple):
    """A prediction for one recipe on one cluster."""

    cluster: Cluster
    recipe: str
    prediction: Prediction | OuterPrediction


OUTER_NOTE = (
    "Bytes a step: in the mean. Of a turn: those of the largest fragment, which is the peak. Delay: steps "
    "from the start of a turn to its end, in which training goes on. The least period leaves a fifth of the "
    "time free. For what it does to the loss, see docs/local_sgd.md."
)


SHARDED_NOTE = (
    "allreduce: torch's own sharding over Gloo. Gathers: the parameters, of what a node sends. As on CPU, "
    "computing waits for torch's gathers, and those of --weights overlap with it; on CUDA all overlap, and "
    "steps are shorter."
)


def plan_json(rows: Sequence[PlannedRow]) -> str:
    """Return predictions as a JSON list."""
    fields = [
        {
            "workers": cluster.num_workers,
            "nodes": cluster.num_nodes,
            "recipe": recipe,
            "step_ms": 1e3 * prediction.step_s,
            "efficiency": prediction.efficiency,
            "bytes_per_step": prediction.bytes_per_step,
            **_more(recipe, prediction),
        }
        for cluster, recipe, prediction in rows
    ]
    return json.dumps(fields, indent=2, allow_nan=False)


def _more(recipe: str, prediction: Prediction | OuterPrediction) -> dict[str, float | str]:
    if isinstance(prediction, Prediction):
        return {"num_messages": prediction.num_messages, "gathered_bytes": prediction.gathered_bytes}
    return {
        "period": prediction.period,
        "fragments": prediction.fragments,
        "bytes_per_turn": prediction.turn_bytes,
        "peak_over_average": prediction.peak,
        "turn_ms": 1e3 * prediction.turn_s,
        "delay": prediction.delay,
        "least_period": prediction.least_period,
        "call": prediction.call(recipe),
    }


def first_call(rows: Sequence[PlannedRow]) -> str:
    """Return the code that trains as the first row of an outer loop says."""
    first = rows[0]
    assert isinstance(first.prediction, OuterPrediction)
    return f"The first row as code: {first.prediction.call(first.recipe)}"


def outer_table(title: str, rows: Sequence[PlannedRow], period: int | None) -> Table:
    """Return predictions of an outer loop as a table, with a section for each cluster.

    ``period`` is the one that the user has chosen; None if it is the least one.
    """
    figures = ("step\nms", "efficiency", "bytes\na step", "of a\nturn", "turn\nms", "delay")
    table = _table(title, ("workers", "recipe", *figures, "period" if period is None else "least\nperiod"))
    last_recipe = rows[-1].recipe
    for cluster, recipe, prediction in rows:
        assert isinstance(prediction, OuterPrediction)
        table.add_row(
            *_first_cells(cluster, recipe, prediction),
            decimal(prediction.turn_bytes),
            f"{1e3 * prediction.turn_s:.0f}",
            str(prediction.delay),
            str(prediction.period if period is None else prediction.least_period),
            end_section=recipe == last_recipe,
        )
    return table


def plan_table(title: str, rows: Sequence[PlannedRow], *, is_sharded: bool = False) -> Table:
    """Return predictions as a table, with a section for each cluster."""
    gathers = ("gathers",) if is_sharded else ()
    columns = ("workers", "recipe", "step ms", "efficiency", "a node\nsends", *gathers, "messages")
    table = _table(title, columns)
    last_recipe = rows[-1].recipe
    for cluster, recipe, prediction in rows:
        assert isinstance(prediction, Prediction)
        table.add_row(
            *_first_cells(cluster, recipe, prediction),
            *(decimal(prediction.gathered_bytes) for _ in gathers),
            str(prediction.num_messages),
            end_section=recipe == last_recipe,
        )
    return table


def _first_cells(cluster: Cluster, recipe: str, prediction: Prediction | OuterPrediction) -> tuple[str, ...]:
    """Return the cells that every prediction has: workers, recipe, step time, efficiency and bytes."""
    return (
        str(cluster.num_workers),
        escape(recipe),
        f"{1e3 * prediction.step_s:.1f}",
        f"{prediction.efficiency:.0%}",
        decimal(prediction.bytes_per_step),
    )


def comparison_json(comparisons: Sequence[Comparison]) -> str:
    """Return comparisons with measurements as a JSON list."""
    return json.dumps([{**c.__dict__, "error": c.error} for c in comparisons], indent=2)


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Return comparisons with measurements as a table."""
    table = _table("step time, ms", ("hosts", "link", "recipe", "measured", "predicted", "error"))
    for c in comparisons:
        figures = (f"{c.measured_ms:.1f}", f"{c.predicted_ms:.1f}", f"{c.error:+.0%}")
        table.add_row(str(c.num_hosts), c.link, escape(c.recipe), *figures)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=f"{title}\n",
        box=box.SIMPLE,
        title_justify="left",
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,  # without its two columns, powersgd fits 80
    )
    for column in columns:
        if column == "recipe":  # a long one wraps; figures never do
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table
