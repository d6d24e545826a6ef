"""Network namespaces without names.

The kernel removes a namespace with its last open file and its last process, so a killed program leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
# The calling thread's namespace; /proc/self would be the main thread's.
_CURRENT = "/proc/thread-self/ns/net"


class Namespace:
    """One network namespace, kept alive by an open file."""

    def __init__(self) -> None:
        """Make a namespace. Raises OSError if the kernel refuses."""
        with _returning():
            _call("unshare", _CLONE_NEWNET)
            self._file: int | None = os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def file(self) -> int:
        """The number of the open file. Raises ValueError once closed."""
        if self._file is None:
            raise ValueError("this lab is closed")
        return self._file

    @property
    def path(self) -> str:
        """The path by which other processes of this user reach it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread, and the processes that it starts, into the namespace and back."""
        with _returning():
            _call("setns", self.file, _CLONE_NEWNET)
            yield

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def enter_namespace(path: str) -> None:
    """Move the calling thread into the namespace at ``path`` for good."""
    with open(path) as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    before = os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _call("setns", before, _CLONE_NEWNET)
        finally:
            os.close(before)


def _call(name: str, *arguments: int) -> None:
    # os.unshare and os.setns came with Python 3.12.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
