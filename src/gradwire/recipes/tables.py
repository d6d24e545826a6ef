"""Embedding tables: which parameters of a model they are, and the recipe that averages them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import nn

from gradwire.buckets import canonical_name
from gradwire.exchanges import Route
from gradwire.recipes.composed import map_leaves, merge_stages, route
from gradwire.recipes.registry import RECIPES, spec_with
from gradwire.recipes.value import Recipe


def route_module_tables(recipe: Recipe, module: nn.Module, trained: Collection[str]) -> Recipe:
    """Return ``recipe`` with the module's tables routed by its recipe for tables.

    A module whose ``trained`` parameters are all tables keeps ``recipe`` as it is.
    """
    tables = [name for name in table_names(module) if name in trained]
    if recipe.tuning is not None:
        return replace(recipe, tuning=replace(recipe.tuning, tables=tuple(tables)))
    return route_tables(recipe, tables) if len(tables) < len(trained) else recipe


def route_tables(whole: Recipe, names: Iterable[str]) -> Recipe:
    """Return a route of the parameters ``names`` by the recipe for tables, and of all others by ``whole``.

    In a schedule, each stage has its own recipe for tables. Returns ``whole`` itself if it has no recipe
    for tables, if it is a route, if there are no names, or if no name can stand in a route.

    >>> from gradwire.recipes import recipe
    >>> print(route_tables(recipe("powersgd"), ["embed.weight"]))
    route(embed.weight=int4; *=powersgd:tables=same)
    >>> print(route_tables(recipe("schedule(0=int4; 9=sign)"), ["embed.weight"]))
    route(embed.weight=int4; *=schedule(0=int4; 9=sign:tables=same))
    """
    chosen = [name for name in names if not set(name) & set("*?[=;&<>()")]
    is_same = all(each.tables == "same" for each in whole.leaves())
    if not chosen or is_same or isinstance(whole.exchange, Route):
        return whole
    tables = merge_stages(map_leaves(whole, _for_tables))
    return route({**dict.fromkeys(chosen, tables), "*": map_leaves(whole, for_others)})


def for_others(leaf: Recipe) -> Recipe:
    """Return the recipe that averages everything but tables: ``leaf``, without a recipe for them."""
    if leaf.tables == "same":
        return leaf
    return replace(leaf, name=spec_with(leaf, tables="same"), tables="same")


def _for_tables(leaf: Recipe) -> Recipe:
    """Return the recipe that averages tables."""
    if leaf.tables == "same":
        return leaf
    shared = {"local_size": leaf.local_size, "momentum": leaf.momentum}
    given = {name: value for name, value in shared.items() if value}
    return RECIPES[leaf.tables](reduction=leaf.reduction, **given)


def table_names(module: nn.Module) -> list[str]:
    """Return the names of a module's tables: embeddings, and layers that predict the embedded tokens.

    In one step, most rows of a table get almost no gradient, since their tokens are not in the batch, and a
    few get a large one. Neither the mean magnitude of a block nor a few directions keep such a gradient:
    see docs/fidelity-defaults.md.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    # Sparse gradients are not compressed.
    tables = [m for m in module.modules() if isinstance(m, kinds) and not m.sparse]
    chosen = {id(p) for m in (*tables, *_heads(module, tables)) for p in m.parameters()}
    return [canonical_name(name) for name, p in module.named_parameters() if id(p) in chosen]


def _heads(module: nn.Module, tables: Sequence[nn.Embedding | nn.EmbeddingBag]) -> list[nn.Linear]:
    """Return the layers that predict tokens: those with as many outputs as a table has rows.

    Inner layers may have as many outputs by chance, above all where that is the length of a sequence. A
    size is ambiguous if some layer takes as many inputs, or if more layers than tables have it. Of the
    layers of an ambiguous size, a head is one that shares a table's weight, or the last layer of the
    model if its weight has a table's shape.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    num_tables = Counter(table.num_embeddings for table in tables)
    num_layers = Counter(layer.out_features for layer in layers)
    input_sizes = {size for p in module.parameters() for size in p.shape[1:]}
    ambiguous = {size for size in num_tables if size in input_sizes or num_layers[size] > num_tables[size]}

    def is_head(layer: nn.Linear) -> bool:
        if layer.out_features not in ambiguous:
            return layer.out_features in num_tables
        is_last = layer is layers[-1]
        return any(
            layer.weight is table.weight or (is_last and layer.weight.shape == table.weight.shape)
            for table in tables
        )

    return [layer for layer in layers if is_head(layer)]
