"""A progress bar for measurements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def show_progress(
    console: Console, title: str, *, quiet: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Show a bar, and yield the function that moves it: call it with ``(done, in all)``.

    Without a terminal, the title is printed once.
    """
    if quiet or os.environ.get("RANK", "0") != "0":
        yield lambda *_: None
        return
    if not console.is_terminal:
        console.print(f"{title} ...")
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # Drawn only when a rank reports: a timer would take time from the ranks on the same cores.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(f"{title}: starting ranks", total=None)
        progress.refresh()
        yield lambda num_done, num_in_all: progress.update(
            task, description=title, completed=num_done, total=num_in_all, refresh=True
        )
