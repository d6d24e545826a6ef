"""Consoles that commands print to."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from rich.console import Console

# Tables need it. In a narrower terminal lines wrap; rich would cut off figures, and print nothing at width 0.
_LEAST_WIDTH = 80


def open_console(*, stderr: bool = False) -> Console:
    """Return a console without emoji: rich would replace the ``:x:`` in ``module:x: error``.

    Characters that the stream cannot encode are escaped. File names may have some.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    console = Console(stderr=stderr, highlight=False, emoji=False)
    console.width = max(console.width, _LEAST_WIDTH)
    return console


def drop_stdout() -> None:
    """Throw away what cannot be written, so that Python does not try again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def stdout_to_stderr(wanted: bool) -> Iterator[None]:
    """Send to stderr all that this process and its children print to stdout, if ``wanted``.

    A model or a script of the user's may print, and what a program reads from stdout must stand alone.
    """
    if not wanted:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
