"""Import of the framework that an adapter serves."""

from __future__ import annotations

import importlib
from typing import Any


def import_framework(module: str, extra: str) -> Any:
    """Import a module of a framework; ModuleNotFoundError says which extra of gradwire brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"gradwire.adapters.{extra} needs {error.name}, which is not installed: "
            f"pip install 'gradwire[{extra}]'",
            name=error.name,
        ) from None
