"""Lengths of time as people write them: ``20ms``, ``500us``, ``0.1s``."""

from __future__ import annotations

import re

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST_S = 60.0


def parse_delay(text: str) -> float:
    """Return the delay in seconds. Raises ValueError or TypeError if ``text`` is no delay.

    >>> parse_delay("20ms"), parse_delay("0.1 s")
    (0.02, 0.1)
    """
    if not isinstance(text, str):
        raise TypeError(f"a delay is text, such as '20ms', not {text!r}")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip().lower())
    seconds = -1.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(
            f"a delay is a number and us, ms or s, such as 20ms, above 0 and at most {_LONGEST_S:g}s, not "
            f"{text[:40]!r}"
        )
    return seconds


def format_delay(seconds: float) -> str:
    """Return the delay as text, in the largest unit of which it has at least one.

    >>> format_delay(0.02), format_delay(0.0005), format_delay(1.5)
    ('20ms', '500us', '1.5s')
    """
    unit = next((u for u in ("s", "ms") if seconds >= _UNITS[u]), "us")
    return f"{seconds / _UNITS[unit]:g}{unit}"
