"""Resolution of a recipe for a model and its ranks: embedding tables, nodes, and what all ranks agree on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from gradwire.buckets import Layouts, canonical_name
from gradwire.exchanges import Route
from gradwire.ops import Family
from gradwire.peers import Claim, CollectiveCall
from gradwire.recipes.composed import placed, route_tables
from gradwire.recipes.registry import Recipe

# The variables in which torchrun and Open MPI give a rank the size of its node and its place there.
_LAUNCHERS = (
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


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


def route_module_tables(recipe: Recipe, module: nn.Module, trained: Collection[str]) -> Recipe:
    """Return ``recipe`` with the module's tables routed by its recipe for tables.

    A module whose ``trained`` parameters are all tables keeps ``recipe`` as it is.
    """
    tables = [name for name in table_names(module) if name in trained]
    if recipe.tuning is not None:
        return replace(recipe, tuning=replace(recipe.tuning, tables=tuple(tables)))
    return route_tables(recipe, tables) if len(tables) < len(trained) else recipe


def table_names(module: nn.Module) -> list[str]:
    """Return the names of a module's tables: embeddings, and layers that predict the embedded tokens.

    In one step, most rows of a table get almost no gradient, since their tokens are not in the batch, and a
    few get a large one. Neither the mean magnitude of a block nor a few directions keep such a gradient:
    see docs/fidelity.md.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    # Sparse gradients are not compressed.
    tables = [m for m in module.modules() if isinstance(m, kinds) and not m.sparse]
    chosen = {id(p) for m in (*tables, *_heads(module, tables)) for p in m.parameters()}
    return [canonical_name(name) for name, p in module.named_parameters() if id(p) in chosen]


def require_nodes(recipe: Recipe, world_size: int) -> None:
    """Raise ValueError if the ranks cannot be divided into the recipe's nodes."""
    for each in recipe.leaves():
        if world_size % (each.local_size or 1):
            raise ValueError(
                f"recipe {each}: {world_size} ranks cannot be nodes of {each.local_size}; give a local_size "
                "that divides the number of ranks"
            )


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


def kernels_of(recipe: Recipe, group: dist.ProcessGroup) -> frozenset[Family]:
    """Return the kernels of ``recipe``, provided that all ranks detect the node size that this one does."""
    return placed(recipe, detect_node_size(group), group.size()).exchange.kernels


def agree_on_nodes(recipe: Recipe, call: CollectiveCall, claim: Claim) -> Recipe:
    """Agree on ``claim`` with every rank, and return ``recipe`` for the node size that all ranks detect."""
    notes = call.agree(claim, note=str(detect_node_size(call.group)))
    return placed(recipe, common_node_size(notes), call.group.size())


def detect_node_size(group: dist.ProcessGroup) -> int:
    """Return the number of ranks in this rank's node, as its launcher gives it.

    Returns 1 if the launcher gives none, if all ranks are in one node, if nodes are not equal runs of
    consecutive ranks, or if the group is not the whole world.
    """
    size, rank = group.size(), group.rank()
    for names in _LAUNCHERS:
        texts = [os.environ.get(name, "") for name in names]
        if all(text.isdecimal() for text in texts):
            local_size, local_rank = map(int, texts)
            is_even = 0 < local_size < size == dist.get_world_size() and size % local_size == 0
            return local_size if is_even and local_rank == rank % local_size else 1
    return 1


def common_node_size(sizes: Iterable[str]) -> int:
    """Return the node size that all ranks have detected, or 1 if they differ.

    >>> common_node_size(["2", "2", "2", "2"]), common_node_size(["2", "1", "1", "2"])
    (2, 1)
    """
    distinct = set(sizes)
    return int(distinct.pop()) if len(distinct) == 1 else 1


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
