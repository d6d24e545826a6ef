"""Fields of JSON files that others may have edited: parsed, and checked for type and size."""

from __future__ import annotations

import json
import unicodedata
from typing import Any, NoReturn

_MAX_TEXT = 100_000


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for other texts, and for NaN and infinities."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def printable(text: str) -> str:
    r"""Return the text with an escape for each character that a terminal or a file cannot show.

    >>> print(printable("train\udcff.py"))
    train\udcff.py
    """
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


def read_field(data: object, key: str, *kinds: type | None) -> Any:
    """Return ``data[key]``. Raises ValueError unless it is there and of one of ``kinds``, None for null."""
    if not isinstance(data, dict):
        raise ValueError(f"an object with {key!r} was expected, not {_shown(data)}")
    if key not in data:
        raise ValueError(f"{key!r} is missing")
    value = data[key]
    # By type(), because isinstance() takes True for an int.
    if (None if value is None else type(value)) not in kinds:
        expected = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise ValueError(f"{key!r} must be {expected}, not {_shown(value)}")
    return value


def read_text(data: object, key: str, *, or_null: bool = False) -> Any:
    """Return a text that can be shown; with ``or_null``, null is allowed too."""
    kinds = (str, None) if or_null else (str,)
    value = read_field(data, key, *kinds)
    if value is not None and (len(value) > _MAX_TEXT or printable(value) != value):
        raise ValueError(f"{key!r} must be at most {_MAX_TEXT} printable characters, not {_shown(value)}")
    return value


def read_whole(data: object, key: str, low: int, high: int, *, or_null: bool = False) -> Any:
    """Return a whole number from ``low`` to ``high``; with ``or_null``, null is allowed too."""
    kinds = (int, None) if or_null else (int,)
    return _check_range(key, read_field(data, key, *kinds), low, high)


def read_number(data: object, key: str, low: float, high: float, *, or_null: bool = False) -> Any:
    """Return a number from ``low`` to ``high``; with ``or_null``, null is allowed too."""
    kinds = (float, int, None) if or_null else (float, int)
    return _check_range(key, read_field(data, key, *kinds), low, high)


def _check_range(key: str, value: float | None, low: float, high: float) -> float | None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{key!r} must be from {low:g} to {high:g}, not {_shown(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON allows")


def _shown(value: object) -> str:
    """Return the beginning of a value."""
    try:
        return json.dumps(value)[:40]
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
