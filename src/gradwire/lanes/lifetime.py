"""Objects that own threads or connections: their finalizers, and their copies, which are refused."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex

from gradwire.peers import wait_until_asleep


class Uncopied:
    """An object with threads and connections of this process, which is neither copied nor pickled."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"{kind} has threads and connections of this process, and cannot be copied or pickled: save "
            f"its state_dict() instead, and keep the {kind} outside of what you copy"
        )


class _Exit:
    """The end of the interpreter, which has begun or not."""

    has_begun = False


# The first to be registered, and so the last to run: see Note [Threads of Gloo at exit].
atexit.register(wait_until_asleep)
# Finalizers run at exit after functions that are registered with atexit after the first finalizer.
weakref.finalize(_Exit, lambda: None)
atexit.register(setattr, _Exit, "has_begun", True)


def is_exiting() -> bool:
    """Return True in a finalizer that runs because the interpreter ends."""
    return _Exit.has_begun


def register_finalizer(owner: object, end: Callable[..., None], *args: Any) -> weakref.finalize[Any, Any]:
    """Call ``end(*args)`` once: when the result is called, when ``owner`` is collected, or at exit.

    A forked child process does not call it, since the threads and connections are its parent's.
    """
    pid = os.getpid()

    def end_here() -> None:
        if os.getpid() == pid:
            end(*args)

    return weakref.finalize(owner, end_here)


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait a few seconds for each thread, except the one that calls this."""
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5)
