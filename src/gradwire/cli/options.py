"""Options that several commands share, and the way in which a command takes its options."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

import gradwire
from gradwire.recipes import can_scatter

Options = TypeVar("Options")

# A first look is shorter without those that are much like another: fp16, fp8, int3 and acp. topk is for outer
# optimizers, and slow in every step.
_LEFT_OUT = ("noop", "auto", "topk", "fp16", "fp8", "int3", "acp")
COMPARED = tuple(name for name in gradwire.RECIPES if name not in _LEFT_OUT)

Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help="A recipe, such as bf16 or int4:block=64; `gradwire recipes` lists them. Repeat the option for "
        f"several. Default: {', '.join(COMPARED)}.",
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
ShardingKind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Shard the model by fully_shard, in place of DDP: fsdp over all ranks, hsdp within replicas.",
        show_default=False,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write a page with charts.", show_default=False),
]


def takes_options(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Let a command take its options as one value of the dataclass ``kind``.

    Each field is an option or an argument, annotated as typer's parameters are.
    """
    hints = get_type_hints(kind, include_extras=True)
    fields = inspect.signature(kind).parameters.values()
    parameters = [field.replace(annotation=hints[field.name]) for field in fields]

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            function(kind(**values))

        # typer reads the parameters of a command from its signature and its annotations.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return decorate


def recipes_for(given: list[str] | None, kind: str | None) -> list[str]:
    """Return the recipes that were given, or by default all that can be used with a kind of sharding."""
    if given or kind is None:
        return list(given or COMPARED)
    return [name for name in COMPARED if kind != "fsdp" or can_scatter(gradwire.recipe(name))]


def check_writable(option: str, path: Path | None) -> None:
    """Raise ValueError now if ``path`` could not be written later, or is an option that follows."""
    if path is None:
        return
    if str(path).startswith("--"):
        raise ValueError(f"{option} takes a file, and {path} is an option: write {option} FILE {path}")
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    if reason is not None:
        raise ValueError(f"{option}: cannot write {path}: {reason}")


def check_positive(option: str, value: float | None) -> None:
    """Raise ValueError if the value is not above 0 and finite."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{option} must be above 0 and finite, not {value:g}")
