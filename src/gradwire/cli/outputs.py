"""Output of records: tables and verdicts to the terminal, the rest to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from gradwire.cli.consoles import open_console
from gradwire.cli.ending import FAILED, stop
from gradwire.cli.options import check_writable
from gradwire.headroom import (
    Record,
    describe_decisions,
    describe_proposal,
    give_verdict,
    step_table,
    write_records,
)
from gradwire.report import render_page


class RecordOutput:
    """Shows records as they come, and writes them at the end.

    Args:
        json_file: file to write the records to; ``-`` is stdout, and then all else goes to stderr.
        html: file to write the page to.
        quiet: show only verdicts.
    """

    def __init__(self, json_file: str | None, html: Path | None, quiet: bool) -> None:
        self.errors = open_console(stderr=True)
        self.json_to_stdout = json_file == "-"
        self._console = self.errors if self.json_to_stdout else open_console()
        self._json_path = None if json_file is None or self.json_to_stdout else Path(json_file)
        self._html_path = html
        self._quiet = quiet

    def check(self) -> None:
        """Raise ValueError now if something could not be written later."""
        check_writable("--json", self._json_path)
        check_writable("--html", self._html_path)

    def show(self, record: Record) -> None:
        """Print a record's table and its verdict."""
        if not self._quiet:
            self._console.print(step_table(record), "")
        self._console.print(give_verdict(record), markup=False)
        if proposal := describe_proposal(record):
            self._console.print(proposal, markup=False)
        if not self._quiet:
            for line in describe_decisions(record):
                self._console.print(line, markup=False)

    def write(self, records: Sequence[Record]) -> None:
        """Write all records to the files that were asked for; exit with 1 if one cannot be written."""
        if self.json_to_stdout:
            typer.echo(write_records(records), nl=False)
        files = (("--json", self._json_path, write_records), ("--html", self._html_path, render_page))
        for option, path, content in files:
            if path is not None:
                try:
                    path.write_text(content(records), encoding="utf-8")
                except OSError as error:
                    stop("headroom", f"{option}: cannot write {path}: {error.strerror}", FAILED)
                if not self._quiet:
                    self.errors.print(f"written: {path}", markup=False)
