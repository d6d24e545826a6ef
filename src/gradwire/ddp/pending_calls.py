"""Calls of users' hooks that are still under way when the program ends.

After a failure, the collectives of a user's hook go on waiting on the threads of the user's group. When they
end while the interpreter does, their callbacks abort the process. So at exit they are made to end before it:
the connections of the group are closed, and the callbacks waited for.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref

import torch.distributed as dist

from gradwire.peers import close_connections

_PATIENCE_S = 3.0
# After our callback, the thread still has to leave those of torch.
_MOMENT_S = 0.3
_MAX_CALLS = 64
_calls: list[tuple[weakref.ref[dist.ProcessGroup], threading.Event]] = []
_failed = threading.Event()


def note_call(group: weakref.ref[dist.ProcessGroup], finished: threading.Event) -> None:
    """Note a call of a hook over ``group``; ``finished`` is set at the end of its callbacks."""
    if len(_calls) >= _MAX_CALLS:
        _calls[:] = [(each, waiting) for each, waiting in _calls if not waiting.is_set()]
    _calls.append((group, finished))


def note_failure() -> None:
    """Note that a hook has failed, so that a thread of its group may be busy with the error."""
    _failed.set()


@atexit.register
def _end_all() -> None:
    left = [(group(), finished) for group, finished in _calls if not finished.is_set()]
    for group in {group for group, _ in left if group is not None}:
        close_connections(group)
    deadline = time.monotonic() + _PATIENCE_S
    for _, finished in left:
        finished.wait(max(deadline - time.monotonic(), 0.0))
    if left or _failed.is_set():
        time.sleep(_MOMENT_S)
