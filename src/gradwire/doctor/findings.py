"""Findings: one fact each, with advice if something would go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]
"""A note is something that a feature lacks; a problem would stop or slow down training."""


@dataclass(frozen=True)
class Finding:
    """One fact about the machine or the group."""

    topic: str
    level: Level
    text: str
    advice: str = ""
    """A sentence that says what to do; empty if there is nothing to do."""
