"""Processes beside this one: watched together, ended with all that they have started, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any


def wait_for_all(
    processes: Sequence[subprocess.Popen[Any]], timeout: float | None = None
) -> tuple[int, int] | None:
    """Wait until all have ended well, or one has not: then which, and its exit code, below 0 for a signal.

    Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code:
                return index, code
        if None not in codes:
            return None
        if deadline is not None and timeout is not None and time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(processes[0].args, timeout)
        time.sleep(0.05)


def how_it_ended(code: int) -> str:
    """An exit code in words.

    >>> how_it_ended(3), how_it_ended(-9)
    ('exit code 3', 'signal SIGKILL')
    """
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def end_group(leader: int) -> None:
    """Kill a process that leads a group, if it still runs, and what it has started and left in the group."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def end_with_parent(wait: Callable[[], object]) -> None:
    """End this process, and the group that it leads, when ``wait`` returns or raises: its parent is gone.

    It waits at a pipe that the parent never writes to, and that ends with it also when it is killed.
    """

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            wait()
        end_group(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
