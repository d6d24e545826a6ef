"""Link rates as people write them: ``100mbit``, ``1gbit``, ``2.5gbit``."""

from __future__ import annotations

import re

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Bounds that no link is near.
_SLOWEST, _FASTEST = 1.0, 1e15


def parse_rate(text: str) -> float:
    """Return the rate in bits per second. Raises ValueError or TypeError if ``text`` is no rate.

    >>> parse_rate("2.5gbit")
    2500000000.0
    """
    if not isinstance(text, str):
        raise TypeError(f"a rate is text, such as '100mbit', not {text!r}")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)(?:/s|ps)?", text.strip().lower())
    bits_per_s = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not _SLOWEST <= bits_per_s <= _FASTEST:
        raise ValueError(f"a rate is a number and kbit, mbit or gbit, such as 100mbit, not {text[:40]!r}")
    return bits_per_s


def format_rate(bits_per_s: float) -> str:
    """Return the rate as text, in the largest unit of which it has at least one.

    >>> format_rate(1e9), format_rate(2.5e9), format_rate(100e6)
    ('1gbit', '2.5gbit', '100mbit')
    """
    unit = next((u for u in ("gbit", "mbit") if bits_per_s >= _UNITS[u]), "kbit")
    return f"{bits_per_s / _UNITS[unit]:g}{unit}"
