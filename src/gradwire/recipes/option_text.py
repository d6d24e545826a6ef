"""A factory's arguments as text: its name, and the options that differ from their defaults."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal


def format_spec(factory: Callable[..., Any], options: dict[str, object]) -> str:
    """Return the text for a call of ``factory`` with these arguments: ``"int4:block=64"``.

    Raises TypeError for an argument of the wrong type.
    """
    parameters, annotations = inspect.signature(factory).parameters, typing.get_type_hints(factory)
    for key, value in options.items():
        if key in parameters:
            _check_value(factory.__name__, key, value, annotations[key])
    given = [(k, options[k]) for k, p in parameters.items() if options.get(k, p.default) != p.default]
    changed = [f"{k}={_format_value(value)}" for k, value in given]
    return ":".join(filter(None, (factory.__name__, ",".join(changed))))


def parse_options(factory: Callable[..., Any], text: str) -> dict[str, object]:
    """Return the arguments of ``factory`` that a text such as ``"block=64,feedback=false"`` gives.

    Raises ValueError for an option that ``factory`` does not have, and for a value of the wrong type.
    """
    name, annotations = factory.__name__, typing.get_type_hints(factory)
    known = inspect.signature(factory).parameters
    options: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"recipe {name!r}: {item!r} is not of the form option=value")
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"recipe {name!r} has no option {key!r}; {has}")
        if key in options:
            raise ValueError(f"recipe {name!r}: option {key!r} is given twice")
        options[key] = _parse_value(name, key, value, annotations[key])
    return options


# The Python values that an annotation allows, and their name in errors. True is a number, but no block size.
_KINDS: dict[object, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
}


def _check_value(name: str, key: str, value: object, kind: object) -> None:
    """Raise TypeError if ``value`` is not of the annotated type ``kind``; choices are left to the factory."""
    arms = typing.get_args(kind) if _is_union(kind) else (kind,)
    if value is None and types.NoneType in arms:
        return
    allowed, called = _KINDS.get(arms[0], (object, ""))
    if not isinstance(value, allowed) or (isinstance(value, bool) and arms[0] in (int, float)):
        raise TypeError(f"recipe {name!r}: {key} must be {called}, not {value!r}")


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)  # such as `int | None`


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_value(name: str, key: str, text: str, kind: object) -> object:
    """Return the value of option ``key``, of the annotated type ``kind``; ``name`` is for the error."""
    if _is_union(kind):
        if text.lower() == "none" and types.NoneType in typing.get_args(kind):
            return None
        kind = next(arm for arm in typing.get_args(kind) if arm is not types.NoneType)
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if kind is bool:
        choices = ("true", "false")
    try:
        if choices:
            if text.lower() not in choices:
                raise ValueError
            return text.lower() == "true" if kind is bool else text.lower()
        return typing.cast("Callable[[str], object]", kind)(text)
    except ValueError:
        wanted = " or ".join(choices) if choices else _KINDS.get(kind, (str, "text"))[1]
        raise ValueError(f"recipe {name!r}: option {key!r} must be {wanted}, not {text!r}") from None
