"""The threads of Gloo groups, which must hold nothing of Python's when the interpreter ends.

Note [Threads of Gloo at exit]
torch runs the collectives of a Gloo group on threads of the group. When one is over, its thread drops
tensors and callbacks, and needs the GIL for those that nobody else holds. Up to Python 3.13, a thread that
asks for the GIL of an interpreter that ends is unwound. Here it is in a destructor of C++, so the process
aborts: "terminate called without an active exception". A program that ends right after a collective meets
this on a busy machine, without gradwire too (https://github.com/pytorch/pytorch/issues/190489). So at exit
we wait until these threads sleep.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

# torch's name for these threads. A torch before 2.11 may give them none, and nothing is waited for.
_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_FACTS = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
_PATIENCE_S = 5.0


def wait_until_asleep() -> None:
    """Wait until the threads of Gloo groups sleep, other than for the GIL; five seconds at most.

    A thread that waits for another rank sleeps too.
    """
    deadline = time.monotonic() + _PATIENCE_S
    before = _looks()
    while before and time.monotonic() < deadline:
        # Without the GIL. A thread that waits for it gets it now, or looks for it in each switch interval.
        time.sleep(max(2 * sys.getswitchinterval(), 0.01))
        now = _looks()
        if now == before and all("(sleeping)" in look for look in now.values()):
            return
        before = now


def _looks() -> dict[str, str]:
    """Return a text for each thread: its state, and how often it has run."""
    found = {}
    for task in _TASKS.glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == _NAME:
                lines = (task / "status").read_text().splitlines()
                found[task.name] = " ".join(line for line in lines if line.startswith(_FACTS))
    return found
