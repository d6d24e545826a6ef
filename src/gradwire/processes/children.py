"""Watch child processes, and end them with everything that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_POLL_S = 0.05


@dataclass(frozen=True)
class ChildFailure:
    """The first child that did not end with exit code 0."""

    index: int
    """Its place in the sequence of children."""
    code: int
    """Its exit code; minus the signal's number if a signal killed it."""

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would report: 128 plus the signal's number."""
        return self.code if self.code > 0 else 128 - self.code


def wait_for_all(
    processes: Sequence[subprocess.Popen[Any]],
    timeout: float | None = None,
    has_finished: Callable[[int], bool] = lambda index: False,
) -> ChildFailure | None:
    """Wait until all have ended well, or until one has failed; return that failure.

    A child for whose index ``has_finished`` returns True has done its work, however it ends. Raises
    ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code and not has_finished(index):
                return ChildFailure(index, code)
        if None not in codes:
            return None
        if deadline is not None and timeout is not None and time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(processes[0].args, timeout)
        time.sleep(_POLL_S)


def describe_exit(code: int) -> str:
    """Return an exit code in words.

    >>> describe_exit(3), describe_exit(-9), describe_exit(-40)
    ('exit code 3', 'signal SIGKILL', 'signal 40')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"signal {-code}"


def terminate_all(processes: Iterable[subprocess.Popen[Any]], grace_s: float) -> None:
    """Ask the children that still run to end, wait up to ``grace_s`` seconds, then kill the rest."""
    deadline = time.monotonic() + grace_s
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in running:
        process.kill()
        process.wait()


def kill_groups(leaders: Sequence[subprocess.Popen[Any]]) -> None:
    """Kill the process groups that these children lead, and wait for the children."""
    for process in leaders:
        kill_group(process.pid)
    for process in leaders:
        process.wait()


def kill_group(leader: int) -> None:
    """Kill every process of the group that ``leader`` leads or has led."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def end_with_parent(wait: Callable[[], object]) -> None:
    """Kill this process and the group that it leads when ``wait`` returns or raises.

    ``wait`` reads from a pipe to which the parent never writes. The pipe closes when the parent ends,
    even if the parent is killed.
    """

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            wait()
        kill_group(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
