"""The errors a user meets, and how an error keeps its own type while gaining a place."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import MemberDescriptorType

_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_IN_CALLBACK = "Got the following error when running the callback: "


class WireError(RuntimeError):
    """Something went wrong between a backward pass and the wire.

    An error raised by a hook keeps its own type and attributes as well: a full disk inside a hook leaves
    ``backward()`` as an exception that is both a ``WireError`` and an ``OSError`` with its ``errno``.
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


def locate(error: Exception, place: Place) -> WireError:
    """The same error, still of its own type and with its attributes, its text led by where it happened."""
    if isinstance(error, WireError):
        return error
    text = f"{place}: {describe(error)}"
    try:
        located = _copy(error)
        located.text = text
    except Exception:  # a class that cannot be mixed with another, or copied
        located = WireError(text)
    located.__cause__ = error
    return located


def _copy(error: Exception) -> WireError:
    """A WireError that is also of the error's type, made past its ``__init__``, which may want anything."""
    kind = type(error)
    both = WireError if issubclass(WireError, kind) else _mixed(kind)
    # Classes made by C keep things of their own; those made from them have all in args and attributes.
    native = next(base for base in kind.__mro__ if not base.__flags__ & _IS_HEAP_TYPE)
    located: WireError = native.__new__(both, *error.args)
    native.__init__(located, *error.args)  # type: ignore[misc]  # that of the class, as is meant
    located.args = error.args
    located.__dict__.update(error.__dict__)
    for base in kind.__mro__:
        for member in vars(base).values():
            if isinstance(member, MemberDescriptorType):  # a slot, or an errno of C's
                with contextlib.suppress(AttributeError, TypeError):  # not set there, or set by __new__
                    member.__set__(located, member.__get__(error))
    return located


def _mixed(kind: type[Exception]) -> type[WireError]:
    return type(kind.__name__, (WireError, kind), {"__module__": kind.__module__})


def original(error: Exception) -> Exception:
    """The error that a future's callback raised, where torch has made a RuntimeError of it.

    torch keeps its type as text alone; it is found again if it is the only one of that name and can be
    made from a text.
    """
    text = str(error)
    while text.removeprefix("RuntimeError: ").startswith(_IN_CALLBACK):  # one for each `then`
        text = text.removeprefix("RuntimeError: ").removeprefix(_IN_CALLBACK)
    if text == str(error):
        return error
    text = text.partition("\n\nAt:")[0]
    name, _, message = text.partition(": ")
    called = [kind for kind in _subclasses(Exception) if kind.__name__ == name.rpartition(".")[2]]
    kinds = [kind for kind in called if not issubclass(kind, WireError)]  # `locate` makes some of that name
    recovered: Exception = RuntimeError(text)
    if len(kinds) == 1:
        with contextlib.suppress(Exception):
            recovered = kinds[0](message)
    recovered.__cause__ = error
    return recovered


def _subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(_subclasses(child) for child in kind.__subclasses__()))


def describe(error: BaseException) -> str:
    """One line: the error's type and text."""
    try:
        text = str(error)
    except Exception:  # an error whose own text is broken must still be told
        text = "its text cannot be made"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
