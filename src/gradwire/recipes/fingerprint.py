"""Claims for ranks to compare, field by field: their version, recipe, parameters and buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout, canonical_name, dtype_name
from gradwire.recipes.value import Recipe
from gradwire.version import __version__


def of_version() -> dict[str, str]:
    """Return the version of gradwire; other versions may send other bytes for the same recipe."""
    return {"gradwire": __version__}


def of_recipe(recipe: Recipe) -> dict[str, str]:
    """Return the recipe and every field of its exchange.

    >>> from gradwire.recipes import bf16
    >>> of_recipe(bf16())["recipe.exchange.codec.dtype"]
    'torch.bfloat16'
    """
    return {
        "recipe": str(recipe),
        "recipe.reduction": recipe.reduction,
        **dict(_flatten("recipe.exchange", recipe.exchange)),
    }


def of_parameters(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the name, shape and dtype of each parameter that is averaged, in order."""
    return {
        f"parameter {number}": f"{canonical_name(name)}, {_describe(p.shape, p.dtype)}"
        for number, (name, p) in enumerate(named)
    }


def of_bucket(layout: BucketLayout) -> dict[str, str]:
    """Return a bucket's size and dtype, and the name, shape and strides of each parameter in it."""
    name = f"bucket {layout.index}"
    return {
        name: f"{_describe(torch.Size([layout.numel]), layout.dtype)} of {len(layout.slots)} parameters"
        + (f" in {layout.num_shards} shards" if layout.num_shards > 1 else ""),
        **{
            f"parameter {number} of {name}": f"{slot.name}, {_describe(slot.shape)}, strides {slot.stride}"
            for number, slot in enumerate(layout.slots)
        },
    }


def _describe(shape: torch.Size, dtype: torch.dtype | None = None) -> str:
    text = f"shape {tuple(shape)}"
    return text if dtype is None else f"{text}, {dtype_name(dtype)}"


def _flatten(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield a field for ``value`` and, if it is a dataclass or a tuple, one for each value inside it."""
    if is_dataclass(value):
        yield name, type(value).__name__
        for field in fields(value):
            yield from _flatten(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        yield name, f"{len(value)} entries"
        for number, entry in enumerate(value):
            yield from _flatten(f"{name}.{number}", entry)
    else:
        yield name, repr(value)
