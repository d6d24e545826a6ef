"""The errors a user meets, and how an error keeps its own type while gaining a place."""

from __future__ import annotations

import builtins
from dataclasses import dataclass

_IN_CALLBACK = "Got the following error when running the callback: "


class WireError(RuntimeError):
    """Something went wrong between a backward pass and the wire.

    An error raised by a hook keeps its own type as well: a ``KeyError`` inside a hook leaves
    ``backward()`` as an exception that is both a ``KeyError`` and a ``WireError``.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[WireError], tuple[str]]:
        # The classes that `locate` makes are not importable, so pickle falls back to this one.
        base = next(kind for kind in type(self).__mro__ if kind in (PeerError, WireError))
        return base, (self.text,)


class PeerError(WireError):
    """The failure began on another rank; the text is that rank's."""


@dataclass(frozen=True)
class Place:
    """Where in a run something happened."""

    rank: int
    step: int
    bucket: int
    hook: str

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}, bucket {self.bucket}, hook {self.hook}"


def _located_kind(kind: type[Exception]) -> type[WireError]:
    if issubclass(WireError, kind):
        return WireError
    return type(kind.__name__, (WireError, kind), {"__module__": kind.__module__})


def locate(error: Exception, place: Place) -> WireError:
    """The same error, still of its own type, its text led by the place where it happened."""
    if isinstance(error, WireError):
        return error
    text = f"{place}: {describe(error)}"
    try:
        located = _located_kind(type(error))(text)
    except TypeError:  # a class that cannot be mixed with another exception
        located = WireError(text)
    located.__cause__ = error
    return located


def original(error: Exception) -> Exception:
    """The error that a future's callback raised, where torch has made a RuntimeError of it.

    torch keeps its type as text alone, so this finds the types that are built in.
    """
    text = str(error)
    while text.removeprefix("RuntimeError: ").startswith(_IN_CALLBACK):  # one for each `then`
        text = text.removeprefix("RuntimeError: ").removeprefix(_IN_CALLBACK)
    name, _, rest = text.partition(": ")
    kind = getattr(builtins, name, None)
    if text == str(error) or not (isinstance(kind, type) and issubclass(kind, Exception)):
        return error
    recovered = kind(rest.partition("\n\nAt:")[0])
    recovered.__cause__ = error
    return recovered


def describe(error: BaseException) -> str:
    """One line: the error's type and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
