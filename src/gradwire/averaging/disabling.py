"""``GRADWIRE_DISABLE=1``: the environment variable that leaves averaging to torch."""

from __future__ import annotations

import os


def is_disabled() -> bool:
    """Return True if the environment variable ``GRADWIRE_DISABLE`` is set, to anything but 0."""
    return os.environ.get("GRADWIRE_DISABLE", "0") not in ("", "0")


def disabling_claim() -> dict[str, str]:
    """Return the claim that ``GRADWIRE_DISABLE`` is set on all ranks or on none."""
    return {"GRADWIRE_DISABLE": "set" if is_disabled() else "not set"}
