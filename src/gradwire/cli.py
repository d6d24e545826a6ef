"""The ``gradwire`` command."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import gradwire
from gradwire.headroom import Record, Workload, give_verdict, measure_steps, step_table
from gradwire.testing import RanksFailed

_FAILED = 1
_WRONG_ARGUMENTS = 2
_DEFAULT_RECIPES = tuple(name for name in gradwire.RECIPES if name != "noop")

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich"
)


def main() -> None:
    """What the console script calls."""
    app(prog_name="gradwire")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {gradwire.__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def gradwire_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    """Fast, small and correct gradient averaging for PyTorch DDP."""


@app.command()
def recipes() -> None:
    """List the recipes that can go over the wire."""
    table = Table.grid(padding=(0, 2))
    for name, factory in gradwire.RECIPES.items():
        table.add_row(name, (inspect.getdoc(factory) or "").partition("\n")[0])
    Console().print(table)


@app.command()
def headroom(
    ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Processes on this machine, one thread each.")
    ] = 2,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RECIPE",
            help=f"A recipe to measure, such as bf16 or fp16:reduction=sum; may be given several times. "
            f"Default: {', '.join(_DEFAULT_RECIPES)}.",
            show_default=False,
        ),
    ] = None,
    width: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of the transformer; a multiple of 8.")
    ] = 512,
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Of the transformer.")] = 6,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences per rank and step.")] = 2,
    sequence: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per sequence.")] = 64,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Timed steps per recipe.")] = 24,
    bucket_mb: Annotated[
        float | None,
        typer.Option(metavar="MB", help="DDP's bucket_cap_mb. Default: DDP's own.", show_default=False),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the record, too; '-' is stdout, the rest goes to stderr."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The verdict only.")] = False,
) -> None:
    """Is communication my bottleneck? Measure it on this machine.

    Trains a small transformer with plain DDP, with each recipe and without
    any communication, taking turns, and compares the step times.

    Example, for half the default's computation per gradient byte:

        gradwire headroom --recipe bf16 --batch 1 --json headroom.json

    Exit codes: 0 it was measured; 2 wrong arguments;
    1 the measurement failed, and the errors of the ranks are printed.
    """
    errors = Console(stderr=True, highlight=False)
    report = errors if json == "-" else Console(highlight=False)
    try:
        _check_writable(json)
        workload = Workload(width=width, num_layers=layers, batch=batch, sequence=sequence)
        chosen = [gradwire.recipe(spec) for spec in recipe or _DEFAULT_RECIPES]
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"--bucket-mb must be above 0, not {bucket_mb:g}")
    except ValueError as error:
        _stop(errors, str(error), _WRONG_ARGUMENTS)
    try:
        with _progress(errors, quiet) as on_progress:
            record = measure_steps(
                chosen, ranks, workload, num_steps=steps, bucket_mb=bucket_mb, on_progress=on_progress
            )
    except RanksFailed as error:
        _stop(errors, f"the measurement failed: {error}", _FAILED)
    if not quiet:
        report.print(step_table(record), "")
    report.print(give_verdict(record))
    _write(record, json, errors)


def _check_writable(json: str | None) -> None:
    """Raise ValueError now if a measurement could not be written later."""
    if json is None or json == "-":
        return
    path = Path(json)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--json: cannot write {json}")


def _write(record: Record, json: str | None, errors: Console) -> None:
    if json == "-":
        typer.echo(record.to_json(), nl=False)
    elif json is not None:
        try:
            Path(json).write_text(record.to_json())
        except OSError as error:
            _stop(errors, f"--json: {error}", _FAILED)


def _stop(errors: Console, text: str, code: int) -> NoReturn:
    errors.print(f"gradwire headroom: {text}", markup=False, soft_wrap=True)
    raise typer.Exit(code)


@contextmanager
def _progress(console: Console, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar, or a line of text if nobody watches."""
    if quiet:
        yield None
        return
    if not console.is_terminal:
        console.print("measuring ...")
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # Drawn only when a rank reports: a timer would take time from the ranks that it shares cores with.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)
        progress.refresh()

        def on_progress(num_done: int, num_steps: int) -> None:
            progress.update(task, description="measuring", completed=num_done, total=num_steps, refresh=True)

        yield on_progress
