"""The last words of a process that ends by an exception of its own: why, for the ranks that wait for it.

Connections only tell that a rank is gone. So the hook for uncaught exceptions leaves the exception's text in
the group's store before the process ends. If the exception only says that another rank cannot be reached, as
those of torch's own collectives do, the hook tells the user which rank that is.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from gradwire.errors import WireError, describe

if TYPE_CHECKING:
    from gradwire.peers.failure import Failure

_failures: weakref.WeakSet[Failure] = weakref.WeakSet()
_MAX_LENGTH = 500


def register(failure: Failure) -> None:
    """Let ``failure`` share this process's uncaught exception with the other ranks."""
    if not _failures:
        _install()
    _failures.add(failure)


def _install() -> None:
    """Put our hook before the present one, unless it is ours."""
    before = sys.excepthook
    if getattr(before, "is_gradwires", False):
        return

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            _share(error, trace)
        before(kind, error, trace)
        with contextlib.suppress(Exception):
            _explain(error)

    tell.is_gradwires = True  # type: ignore[attr-defined]
    sys.excepthook = tell


def _share(error: BaseException, trace: TracebackType | None) -> None:
    """Leave the exception's text for the other ranks, if this rank is where it began."""
    from gradwire.peers.failure import is_unreachable

    if isinstance(error, WireError) or is_unreachable(error):
        return
    lines = traceback.extract_tb(trace)
    place = f", at {lines[-1].filename}:{lines[-1].lineno} in {lines[-1].name}" if lines else ""
    (text, *_) = describe(error).splitlines()
    for failure in list(_failures):
        if failure.error is None and failure.store is not None:
            told = f"rank {failure.own_name}: its program ended with {text[:_MAX_LENGTH]}{place}"
            failure.set(WireError(told))


def _explain(error: BaseException) -> None:
    """Say which rank cannot be reached, as far as the ranks know."""
    from gradwire.peers.failure import is_unreachable

    if isinstance(error, WireError) or not is_unreachable(error):
        return
    for failure in list(_failures)[:1]:  # they all know the same ranks
        print(f"gradwire: {failure.error or failure.describe_loss()}", file=sys.stderr, flush=True)
