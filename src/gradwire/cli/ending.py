"""Exit codes, and the text with which a command ends if it cannot go on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import typer

from gradwire.cli.consoles import open_console
from gradwire.peers import begin
from gradwire.ranks import RanksFailed

T = TypeVar("T")

FAILED = 1
WRONG_ARGUMENTS = 2
INTERRUPTED = 130


def describe_failures(error: RanksFailed) -> str:
    """Return the errors of all ranks, each different text once, with the ranks that had it."""
    ranks: dict[str, list[str]] = {}
    for rank, text in error.errors.items():
        ranks.setdefault(text.strip(), []).append(str(rank))
    return "\n\n".join(
        f"on rank{'s' if len(where) > 1 else ''} {', '.join(where)}:\n{text}" for text, where in ranks.items()
    )


def clean_up_when_terminated() -> None:
    """Make SIGTERM unwind as Ctrl-C does, so that no rank and no temporary file is left behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def run_until_interrupted(command: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; a Ctrl-C ends this process at once, also while torch connects or waits.

    Python tells the main thread of a Ctrl-C, but not before a call of torch's has returned. So ``work`` has a
    thread of its own.
    """
    try:
        return begin(work).result()
    except KeyboardInterrupt:
        open_console(stderr=True).print(f"gradwire {command}: interrupted", markup=False)
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # a thread that waits in Gloo aborts an interpreter that ends around it


def stop(command: str, text: str, code: int) -> NoReturn:
    """Print the reason to stderr, and exit."""
    open_console(stderr=True).print(f"gradwire {command}: {text}", markup=False, soft_wrap=True)
    raise typer.Exit(code)
