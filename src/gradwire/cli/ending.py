"""How a command ends when it cannot go on: one line for the user, and an exit code that means something."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

FAILED = 1
WRONG_ARGUMENTS = 2
INTERRUPTED = 130


def stop(command: str, text: str, code: int) -> NoReturn:
    """Say what is wrong on stderr, and exit."""
    console = Console(stderr=True, highlight=False)
    console.print(f"gradwire {command}: {text}", markup=False, soft_wrap=True)
    raise typer.Exit(code)
