"""What the main thread of this process does, in words, as another of its threads sees it."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from types import FrameType

from gradwire.errors import describe

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MAX_LENGTH = 200


def describe_main_thread() -> str:
    """Which line of the user's code the main thread is at, and which exception it handles, if any."""
    thread = threading.main_thread().ident
    assert thread is not None
    frame = sys._current_frames().get(thread)
    if frame is None:  # it has ended, and others keep the process alive
        return "its main thread has ended"
    place = _place(frame)
    error = _handled(thread)
    if error is None:
        return f"its main thread is at {place}"
    (text, *_) = describe(error).splitlines()
    return f"its main thread handles {text[:_MAX_LENGTH]}, at {place}"


def _place(frame: FrameType) -> str:
    """The innermost line that is not of a library, which says more than that something waits for a lock."""
    lines = [(line.f_code, number) for line, number in traceback.walk_stack(frame)]
    own = [
        (code, number) for code, number in lines if not code.co_filename.startswith((*_LIBRARIES, "<frozen"))
    ]
    code, number = (own or lines)[0]
    return f"{code.co_filename}:{number} in {code.co_name}"


def _handled(thread: int) -> BaseException | None:
    """The exception whose ``except`` or ``finally`` a thread is in."""
    found = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found  # up to Python 3.11 what sys.exc_info() returns
