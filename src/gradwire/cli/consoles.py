"""Where commands print."""

from __future__ import annotations

from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """Shows text as it is: rich would make a cross of the ``:x:`` in a user's ``module:x: error``."""
    return Console(stderr=stderr, highlight=False, emoji=False)
