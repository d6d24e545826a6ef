"""``gradwire report``: show and compare saved measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from gradwire.cli.consoles import open_console
from gradwire.cli.ending import FAILED, WRONG_ARGUMENTS, stop
from gradwire.cli.options import Html, check_writable
from gradwire.headroom import (
    Record,
    describe_decisions,
    give_verdict,
    printable,
    read_records,
    step_table,
)
from gradwire.report import render_page

_NamedRecord = tuple[str, Record]


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE.json...", help="Files that `gradwire headroom --json` wrote."),
    ],
    html: Html = None,
) -> None:
    """Show saved measurements, and compare several: before and after, here and there.

    Example: the effect of a change to a training:

        gradwire report before.json after.json --html change.html

    Exit codes: 0 shown; 1 the page cannot be written; 2 a file is no
    record, or an argument is wrong.
    """
    try:
        check_writable("--html", html)
    except ValueError as error:
        stop("report", str(error), WRONG_ARGUMENTS)
    named = _read(files)
    console = open_console()
    for name, record in named:
        console.print(f"[bold]{escape(name)}[/bold]")
        console.print(step_table(record), "")
        console.print(give_verdict(record), *describe_decisions(record), "", sep="\n", markup=False)
    if len(named) > 1:
        console.print(_comparison_table(named))
    if html is not None:
        try:
            page = render_page([record for _, record in named], [name for name, _ in named])
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            stop("report", f"--html: cannot write {html}: {error.strerror}", FAILED)


def _read(files: Sequence[Path]) -> list[_NamedRecord]:
    """Return the records of all files, with names that tell them apart."""
    named: list[_NamedRecord] = []
    names_differ = len({path.name for path in files}) == len(files)
    for path in files:
        try:
            records = read_records(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            stop("report", f"{path}: not a headroom record: it is not text in UTF-8", WRONG_ARGUMENTS)
        except OSError as error:
            stop("report", f"{path}: cannot read it: {error.strerror}", WRONG_ARGUMENTS)
        except ValueError as error:
            stop("report", f"{path}: {error}", WRONG_ARGUMENTS)
        for record in records:
            link = f", {record.network}" if len(records) > 1 else ""
            name = printable(path.name if names_differ else str(path))
            named.append((f"{name}{link}", record))
    return named


def _comparison_table(named: Sequence[_NamedRecord]) -> Table:
    """Return the step times of all rows, file by file, and the gain of the last file over the first."""
    table = Table(title="step ms", box=box.SIMPLE, title_justify="left")
    table.add_column("recipe")
    for name, _ in named:
        table.add_column(escape(name), justify="right")
    table.add_column("last over first", justify="right")
    steps = [{record.label(row): row.step_ms for row in record.rows} for _, record in named]
    for label in dict.fromkeys(label for step_ms in steps for label in step_ms):
        times = [step_ms.get(label) for step_ms in steps]
        first, last = times[0], times[-1]
        gain = f"{first / last:.2f}x as fast" if first and last else ""
        table.add_row(escape(label), *("-" if ms is None else f"{ms:.1f}" for ms in times), gain)
    return table
