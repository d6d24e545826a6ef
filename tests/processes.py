"""Processes that are not our children."""

import contextlib
import os
import select
import time
from pathlib import Path


def is_alive(pid):
    """Return True if a process is there and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def states_of(pid):
    """Return the state of each thread of a process, a letter as ``ps`` shows it; nothing if it is gone."""
    states, gone = [], (FileNotFoundError, ProcessLookupError)
    with contextlib.suppress(*gone):  # the process
        for path in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(*gone):  # the thread
                states.append((path / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def wait_until_gone(pids, timeout_s=120.0):
    """Wait until processes have ended. Raises AssertionError if they have not within the timeout."""
    deadline, left = time.monotonic() + timeout_s, []
    for pid in pids:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([ended], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(ended)
        if not ready:
            left.append(pid)
    assert not left, f"processes are left behind: {left}"
