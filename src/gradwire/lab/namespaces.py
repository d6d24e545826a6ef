"""Network namespaces without names: the kernel removes one when its last file and process are gone.

So nothing has to be cleaned up that a killed program could leave behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
# Of the calling thread; /proc/self is the main thread's.
_CURRENT = "/proc/thread-self/ns/net"


class Namespace:
    """One network namespace, kept by an open file."""

    def __init__(self) -> None:
        """Make one. Raises OSError where the kernel does not let this process."""
        with _returning():
            _call("unshare", _CLONE_NEWNET)
            self._file: int | None = os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def file(self) -> int:
        """The open file; ValueError once closed."""
        if self._file is None:
            raise ValueError("this lab is closed")
        return self._file

    @property
    def path(self) -> str:
        """Where other processes of this user find it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread, and what it starts, into the namespace and back."""
        with _returning():
            _call("setns", self.file, _CLONE_NEWNET)
            yield

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def enter(path: str) -> None:
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
