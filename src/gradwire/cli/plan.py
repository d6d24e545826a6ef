"""``gradwire plan``: step times on hardware that is not there."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

import gradwire
from gradwire.cli.consoles import open_console
from gradwire.cli.ending import (
    FAILED,
    INTERRUPTED,
    WRONG_ARGUMENTS,
    clean_up_when_terminated,
    stop,
    why_ranks_failed,
)
from gradwire.cli.options import ALL_RECIPES, Model, Recipes, check_positive, check_writable
from gradwire.cli.progress import show_progress
from gradwire.headroom import ALLREDUCE, ModelFactory, count_of
from gradwire.lab import LabUnavailable, format_rate, parse_rate
from gradwire.planner import (
    CASES,
    Calibration,
    Case,
    Cluster,
    Comparison,
    Shape,
    calibrate,
    can_be_planned,
    predict,
    shapes_of,
    typical_shapes,
    validate,
)
from gradwire.ranks import RanksFailed

_WITHIN = 0.15
# Beyond every model there is, and still counted in seconds.
_MAX_PARAMETERS = 1e13
_NODES = "2,8,64,512"


def plan(
    parameters: Annotated[
        float | None,
        typer.Option(metavar="N", help="Of the model, such as 19e6.", show_default=False),
    ] = None,
    model: Model = None,
    compute_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS", help="Of a step without communication: noop in headroom.", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Numbers of nodes.", show_default="2,8,64,512; --validate: 2,3,4,8"
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="On each node, on one link.")] = 1,
    link: Annotated[str, typer.Option(metavar="RATE", help="Of each node's link.")] = "10gbit",
    latency_us: Annotated[float, typer.Option(min=0, metavar="US", help="Between nodes, one way.")] = 50.0,
    bucket_mb: Annotated[
        float | None, typer.Option(metavar="MB", help="DDP's bucket_cap_mb.", show_default="25")
    ] = None,
    recipe: Recipes = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Kernel speeds; read if it is there, else measured here and written.",
            show_default=False,
        ),
    ] = None,
    validating: Annotated[
        bool,
        typer.Option("--validate", help="Compare predictions with measurements in the lab; minutes, root."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Predict step times, scaling efficiency and bytes of each recipe, for up to thousands of workers.

    From each recipe's own bytes and messages, the link, and kernel speeds that
    are measured on this machine first (a second or two for each recipe).
    --parameters stands for a transformer of that size; --model has shapes of
    its own, which low rank depends on.

    Examples: 350 M parameters with 400 ms of compute; your own model:

        gradwire plan --parameters 350e6 --compute-ms 400 --nodes 2,16,1024

        gradwire plan --model mymodels.gpt:make --compute-ms 85 --link 1gbit

    Exit codes: 0; 2 wrong arguments; 130 interrupted; 1 the calibration failed,
    or --validate found a prediction that is more than 15 % off.
    """
    clean_up_when_terminated()
    errors = open_console(stderr=True)
    try:
        chosen = _recipes(recipe or ALL_RECIPES)
        check_positive("--bucket-mb", bucket_mb)
        if calibration is not None and not calibration.exists():
            check_writable("--calibration", calibration)
        if validating:
            cases = _cases(nodes)
            speeds = _calibration(calibration, chosen, errors)
            comparisons = validate(chosen, speeds, lambda what: errors.print(f"measuring {what} ..."), cases)
            _show_comparisons(comparisons, json)
            raise typer.Exit(FAILED if any(abs(c.error) > _WITHIN for c in comparisons) else 0)
        if compute_ms is None or not 0 < compute_ms < math.inf:
            raise ValueError("--compute-ms must be given, above 0: the time of noop in `gradwire headroom`")
        shapes = _shapes(parameters, model)
        clusters = [
            Cluster(n, workers, parse_rate(link), latency_us * 1e-6) for n in _numbers(nodes or _NODES)
        ]
        speeds = _calibration(calibration, chosen, errors)
        rows = [
            (cluster, name, predict(name, shapes, compute_ms / 1e3, cluster, speeds, bucket_mb))
            for cluster in clusters
            for name in (ALLREDUCE, *chosen)
        ]
    except (ValueError, TypeError, OSError) as error:
        stop("plan", str(error), WRONG_ARGUMENTS)
    except RanksFailed as error:
        stop("plan", f"the measurement failed {why_ranks_failed(error)}", FAILED)
    except LabUnavailable as error:
        stop("plan", str(error), FAILED)
    except KeyboardInterrupt:
        stop("plan", "interrupted", INTERRUPTED)
    if json:
        typer.echo(
            json_text.dumps(
                [
                    {
                        "workers": cluster.num_workers,
                        "nodes": cluster.num_nodes,
                        "recipe": name,
                        "step_ms": 1e3 * found.step_s,
                        "efficiency": found.efficiency,
                        "bytes_per_step": found.bytes_per_step,
                        "num_messages": found.num_messages,
                    }
                    for cluster, name, found in rows
                ],
                indent=2,
            )
        )
        return
    num_parameters = count_of(sum(map(math.prod, shapes)))
    title = (
        f"{num_parameters} parameters, {compute_ms:g} ms of compute, links of "
        f"{format_rate(parse_rate(link))}, {latency_us:g} us"
    )
    if workers > 1:
        title += f", {workers} workers on each node"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("workers", "recipe", "step ms", "efficiency", "a node sends", "messages"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for cluster, name, found in rows:
        table.add_row(
            str(cluster.num_workers),
            escape(name),
            f"{1e3 * found.step_s:.1f}",
            f"{found.efficiency:.0%}",
            decimal(found.bytes_per_step),
            str(found.num_messages),
            end_section=name == [ALLREDUCE, *chosen][-1],
        )
    console = open_console()
    console.print(table)
    console.print(f"Efficiency: compute over step. Kernel speeds: {speeds.machine}.", markup=False)


def _recipes(specs: Sequence[str]) -> list[str]:
    chosen = [gradwire.recipe(spec) for spec in specs]
    for each in chosen:
        if not can_be_planned(each):
            raise ValueError(f"{each} is several recipes: plan each of them by itself")
    return [str(each) for each in dict.fromkeys(chosen) if each.exchange.communicates]


def _shapes(parameters: float | None, model: str | None) -> list[Shape]:
    if (parameters is None) == (model is None):
        raise ValueError("give --parameters or --model, one of them")
    if model is not None:
        shapes = shapes_of(ModelFactory(model).build().model)
        if not shapes:
            raise ValueError(f"the model of {model} has no parameters to train")
        return shapes
    assert parameters is not None
    if not 1 <= parameters <= _MAX_PARAMETERS:
        raise ValueError(f"--parameters must be from 1 to {_MAX_PARAMETERS:g}, not {parameters:g}")
    return typical_shapes(int(parameters))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--nodes takes numbers, such as 2,8,64, not {text!r}") from None


def _cases(nodes: str | None) -> list[Case]:
    """What is measured to compare with: all, or those with these numbers of hosts."""
    if nodes is None:
        return list(CASES)
    numbers, known = _numbers(nodes), dict(CASES)
    for number in numbers:
        if number not in known:
            raise ValueError(f"--validate measures {', '.join(map(str, known))} hosts, not {number}")
    return [case for case in CASES if case[0] in numbers]


def _calibration(path: Path | None, recipes: list[str], errors: Console) -> Calibration:
    if path is not None and path.exists():
        try:
            found = Calibration.from_json(path.read_text(errors="replace"))
        except OSError as error:
            raise ValueError(f"--calibration: cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(
                f"--calibration: {path} is {error}. Give a file that `gradwire plan` wrote, or one that is "
                "not there yet: it is measured and written"
            ) from None
    else:
        with show_progress(errors, "measuring the speed of the recipes") as on_progress:
            found = calibrate(recipes, on_progress)
        if path is not None:
            path.write_text(found.to_json())
    if found.was_disturbed:
        errors.print(
            f"warning: the speeds were measured on a busy machine, with a load average of "
            f"{found.load_average:.1f} on {found.num_cores} cores: expect predictions that are too slow, and "
            "measure again when it is idle",
            markup=False,
        )
    return found


def _show_comparisons(comparisons: list[Comparison], json: bool) -> None:
    if json:
        typer.echo(json_text.dumps([{**c.__dict__, "error": c.error} for c in comparisons], indent=2))
        return
    table = Table(title="a step, ms", box=box.SIMPLE, title_justify="left")
    for column in ("hosts", "link", "recipe", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for c in comparisons:
        figures = (f"{c.measured_ms:.1f}", f"{c.predicted_ms:.1f}", f"{c.error:+.0%}")
        table.add_row(str(c.num_hosts), c.link, escape(c.recipe), *figures)
    open_console().print(table)
