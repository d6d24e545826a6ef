"""A description of what this process's main thread is doing, made from another thread."""

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
    """Name the line of the user's code that the main thread is at, and the exception it handles, if any."""
    thread = threading.main_thread().ident
    assert thread is not None
    frame = sys._current_frames().get(thread)
    if frame is None:  # other threads keep the process alive
        return "its main thread has ended"
    line = _user_line(frame)
    error = _handled_exception(thread)
    if error is None:
        return f"its main thread is at {line}"
    (text, *_) = describe(error).splitlines()
    return f"its main thread handles {text[:_MAX_LENGTH]}, at {line}"


def _user_line(frame: FrameType) -> str:
    """Return the innermost line outside libraries; a library's line would often name no more than a lock."""
    lines = [(line.f_code, number) for line, number in traceback.walk_stack(frame)]
    outside = [
        (code, number) for code, number in lines if not code.co_filename.startswith((*_LIBRARIES, "<frozen"))
    ]
    code, number = (outside or lines)[0]
    return f"{code.co_filename}:{number} in {code.co_name}"


def _handled_exception(thread: int) -> BaseException | None:
    """Return the exception whose ``except`` or ``finally`` block a thread is in."""
    found = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found  # a tuple of sys.exc_info() up to Python 3.11
