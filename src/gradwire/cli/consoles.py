"""Consoles that commands print to."""

from __future__ import annotations

from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """Return a console without emoji: rich would replace the ``:x:`` in ``module:x: error``."""
    return Console(stderr=stderr, highlight=False, emoji=False)
