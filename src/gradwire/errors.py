"""The errors that users meet, and the place in a run where an error happened."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any

_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_IN_CALLBACK = "Got the following error when running the callback: "


class WireError(RuntimeError):
    """The averaging of gradients failed.

    An error raised by a hook keeps its own type and attributes as well: a full disk inside a hook leaves
    ``backward()`` as an exception that is both a ``WireError`` and an ``OSError`` with its ``errno``.

    >>> def full_disk(state, bucket):
    ...     raise OSError(28, "No space left on device")
    >>> wire = gradwire.attach(model, full_disk)
    >>> try:
    ...     model(inputs).sum().backward()
    ... except gradwire.WireError as error:
    ...     print(isinstance(error, OSError), error.errno)
    True 28
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[WireError], tuple[str]]:
        # The classes that `locate` makes cannot be imported, so an error is pickled as its base class.
        base = next(kind for kind in type(self).__mro__ if kind in (PeerError, WireError))
        return base, (self.text,)


class PeerError(WireError):
    """The averaging failed on another rank; the text is that rank's.

    >>> issubclass(PeerError, WireError)
    True
    """


@dataclass(frozen=True)
class Place:
    """A place in a run: one rank's bucket in one step."""

    rank: int
    step: int
    bucket: int
    hook: str

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}, bucket {self.bucket}, hook {self.hook}"


def locate(error: Exception, place: Place) -> WireError:
    """Return the same error with its place before its text; its type and attributes stay."""
    if isinstance(error, WireError):
        return error
    text = f"{place}: {describe(error)}"
    try:
        located = _copy(error)
        located.text = text
    except Exception:  # the class cannot be a base of another, or the error cannot be copied
        located = WireError(text)
    located.__cause__ = error
    return located


def original(error: Exception) -> Exception:
    """Return the error that a future's callback raised, if torch has turned it into a RuntimeError.

    torch keeps the type as text only. The type is restored if it is the only one of that name and can be
    made from a text; if not, the result is a RuntimeError. Any other error is returned as it is.
    """
    text = str(error)
    while text.removeprefix("RuntimeError: ").startswith(_IN_CALLBACK):  # one prefix for each `then`
        text = text.removeprefix("RuntimeError: ").removeprefix(_IN_CALLBACK)
    if text == str(error):
        return error
    text = text.partition("\n\nAt:")[0]
    name, _, message = text.partition(": ")
    named = [kind for kind in _subclasses(Exception) if kind.__name__ == name.rpartition(".")[2]]
    # `locate` makes classes of the same name.
    kinds = [kind for kind in named if not issubclass(kind, WireError)]
    recovered: Exception = RuntimeError(text)
    if len(kinds) == 1:
        with contextlib.suppress(Exception):
            recovered = kinds[0](message)
    recovered.__cause__ = error
    return recovered


def describe(error: BaseException) -> str:
    """Return the error's type and text."""
    try:
        text = str(error)
    except Exception:  # an error whose __str__ raises must still be reported
        text = "its text cannot be made"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def encodable(text: str) -> str:
    r"""Return the text with escapes for lone surrogates, as names of files have them: UTF-8 takes none.

    >>> print(encodable("no file train\udcff.py"))
    no file train\udcff.py
    """
    return text.encode(errors="backslashreplace").decode()


def _copy(error: Exception) -> WireError:
    """Return a WireError that is also of the error's type and has its attributes.

    Does not call the error's own ``__init__``, which may need any arguments.
    """
    kind = type(error)
    both = WireError if issubclass(WireError, kind) else _mixed(kind)
    # Exceptions written in C have hidden fields, which their own __new__ and __init__ must set. Python
    # classes derived from them keep everything in args and attributes.
    native = next(base for base in kind.__mro__ if not base.__flags__ & _IS_HEAP_TYPE)
    # Python lets only the class whose fields the mixed one has make it: not MemoryError, for one.
    made_by: Any = both
    while made_by.__flags__ & _IS_HEAP_TYPE:
        made_by = made_by.__base__
    located: WireError = made_by.__new__(both, *error.args)
    native.__init__(located, *error.args)  # type: ignore[misc]  # the base class's own
    located.args = error.args
    located.__dict__.update(error.__dict__)
    for base in kind.__mro__:
        for member in vars(base).values():
            if isinstance(member, MemberDescriptorType):  # a slot, or a C field such as errno
                with contextlib.suppress(AttributeError, TypeError):  # not set in `error`, or set by __new__
                    member.__set__(located, member.__get__(error))
    return located


def _mixed(kind: type[Exception]) -> type[WireError]:
    return type(kind.__name__, (WireError, kind), {"__module__": kind.__module__})


def _subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(_subclasses(child) for child in kind.__subclasses__()))
