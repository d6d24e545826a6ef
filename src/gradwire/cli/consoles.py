"""Consoles that commands print to."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """Return a console without emoji: rich would replace the ``:x:`` in ``module:x: error``.

    Characters that the stream cannot encode are escaped. File names may have some.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, highlight=False, emoji=False)


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
