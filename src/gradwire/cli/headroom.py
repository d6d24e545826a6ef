"""``gradwire headroom``: whether communication is the bottleneck."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import gradwire
from gradwire.cli.ending import FAILED, WRONG_ARGUMENTS, stop
from gradwire.headroom import Record, Workload, give_verdict, measure_steps, step_table
from gradwire.testing import RanksFailed

_DEFAULT_RECIPES = tuple(name for name in gradwire.RECIPES if name != "noop")


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
        stop("headroom", str(error), WRONG_ARGUMENTS)
    try:
        with _progress(errors, quiet) as on_progress:
            record = measure_steps(
                chosen, ranks, workload, num_steps=steps, bucket_mb=bucket_mb, on_progress=on_progress
            )
    except RanksFailed as error:
        stop("headroom", f"the measurement failed: {error}", FAILED)
    if not quiet:
        report.print(step_table(record), "")
    report.print(give_verdict(record))
    _write(record, json)


def _check_writable(json: str | None) -> None:
    """Raise ValueError now if a measurement could not be written later."""
    if json is None or json == "-":
        return
    path = Path(json)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--json: cannot write {json}")


def _write(record: Record, json: str | None) -> None:
    if json == "-":
        typer.echo(record.to_json(), nl=False)
    elif json is not None:
        try:
            Path(json).write_text(record.to_json())
        except OSError as error:
            stop("headroom", f"--json: {error}", FAILED)


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
