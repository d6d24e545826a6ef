"""How far a measurement has come, for whoever watches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def show_progress(
    console: Console, what: str, *, quiet: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """A bar that is moved by calls with ``(done, in all)``; a line of text if nobody watches."""
    if quiet or os.environ.get("RANK", "0") != "0":
        yield lambda *_: None
        return
    if not console.is_terminal:
        console.print(f"{what} ...")
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # Drawn only when a rank reports: a timer would take time from the ranks that it shares cores with.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(f"{what}: starting ranks", total=None)
        progress.refresh()
        yield lambda num_done, num_in_all: progress.update(
            task, description=what, completed=num_done, total=num_in_all, refresh=True
        )
