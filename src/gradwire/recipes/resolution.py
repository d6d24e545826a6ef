"""A recipe for a model: its tables routed, its nodes and routes checked, and what some callers refuse."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from gradwire.buckets import Layouts
from gradwire.exchanges import Route
from gradwire.recipes.nodes import require_nodes
from gradwire.recipes.tables import route_module_tables
from gradwire.recipes.value import Recipe


def resolve_for_module(
    recipe: Recipe, module: nn.Module, parameters: Mapping[str, nn.Parameter], world_size: int
) -> Recipe:
    """Return ``recipe`` with its tables routed, for a module whose ``parameters`` are averaged.

    Raises ValueError if the ranks cannot be divided into the recipe's nodes, or if its routes do not fit
    the parameters.
    """
    resolved = route_module_tables(recipe, module, parameters)
    require_nodes(resolved, world_size)
    if isinstance(resolved.exchange, Route):
        layouts = Layouts(module).one_per_dtype(list(parameters.values()))
        resolved.exchange.check(slot for layout in layouts for slot in layout.slots)
    return resolved


def require_fixed(recipe: Recipe, what: str) -> None:
    """Raise ValueError if the recipe chooses encodings while it runs, which ``what`` does not let it do."""
    if recipe.tuning is not None:
        raise ValueError(
            f"{recipe} chooses encodings while a model trains, and does not work with {what}: give another "
            "recipe here, such as 'int8'"
        )


def require_averaging(recipe: Recipe, why: str) -> None:
    """Raise ValueError if the recipe ever leaves some gradients unaveraged."""
    if not all(each.exchange.communicates for each in recipe.leaves()):
        raise ValueError(f"{recipe} leaves every rank its own gradients, so {why}")
