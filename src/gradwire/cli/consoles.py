"""Consoles that commands print to."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """Return a console without emoji: rich would replace the ``:x:`` in ``module:x: error``.

    Characters that the stream cannot encode are escaped. File names may have some.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, highlight=False, emoji=False)
