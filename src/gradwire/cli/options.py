"""Options that several commands have, and what they mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import gradwire

ALL_RECIPES = tuple(name for name in gradwire.RECIPES if name != "noop")

Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help="Such as bf16 or int4:block=64 (`gradwire recipes` lists them); may be given several times. "
        f"Default: {', '.join(ALL_RECIPES)}.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FACTORY",
        help="Your own model: a function that returns the model, a batch (a tuple for several "
        "arguments, a dict for named ones) and a loss function of the model's output.",
        show_default=False,
    ),
]
Html = Annotated[
    Path | None,
    # A bracket that is no markup has a backslash before it.
    typer.Option(
        metavar="FILE", help=r"Write a page with charts, too; needs gradwire\[report].", show_default=False
    ),
]


def check_writable(option: str, path: Path | None) -> None:
    """Raise ValueError now if what is found could not be written later."""
    if path is None:
        return
    why = None
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "this user may not"
    if why is not None:
        raise ValueError(f"{option}: cannot write {path}: {why}")


def check_positive(option: str, value: float | None) -> None:
    """Raise ValueError for what is not above 0."""
    if value is not None and not value > 0:
        raise ValueError(f"{option} must be above 0, not {value:g}")
