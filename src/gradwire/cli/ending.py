"""How a command ends when it cannot go on: one line for the user, and an exit code that means something."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import typer

from gradwire.cli.consoles import open_console
from gradwire.ranks import RanksFailed

FAILED = 1
WRONG_ARGUMENTS = 2
INTERRUPTED = 130


def why_ranks_failed(error: RanksFailed) -> str:
    """What went wrong, each different thing once, with the ranks that it happened on."""
    ranks: dict[str, list[str]] = {}
    for rank, text in error.errors.items():
        ranks.setdefault(text.strip(), []).append(str(rank))
    return "\n\n".join(
        f"on rank{'s' if len(where) > 1 else ''} {', '.join(where)}:\n{text}" for text, where in ranks.items()
    )


def clean_up_when_terminated() -> None:
    """Let a SIGTERM unwind as Ctrl-C does, so that no rank and no temporary file is left behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def stop(command: str, text: str, code: int) -> NoReturn:
    """Say what is wrong on stderr, and exit."""
    open_console(stderr=True).print(f"gradwire {command}: {text}", markup=False, soft_wrap=True)
    raise typer.Exit(code)
