"""A recipe as a model and its ranks take it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from gradwire.buckets import Layouts, canonical_name
from gradwire.exchanges import Route
from gradwire.ops import Family
from gradwire.peers import Claim, CollectiveCall
from gradwire.recipes import Recipe, route_tables, with_node_size

# What torchrun and Open MPI tell a rank: how many ranks its node has, and which of them it is.
_LAUNCHERS = (
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def resolve_for_module(
    recipe: Recipe, module: nn.Module, parameters: Mapping[str, nn.Parameter], world_size: int
) -> Recipe:
    """The same for a model that is not wrapped, of which these ``parameters`` are averaged."""
    fitted = with_tables_apart(recipe, module, parameters)
    for each in fitted.plain():
        if world_size % (each.local_size or 1):
            raise ValueError(f"recipe {each}: {world_size} ranks cannot be nodes of {each.local_size}")
    if isinstance(fitted.exchange, Route):
        for_want_of_buckets = Layouts(module).guess(list(parameters.values()))
        fitted.exchange.check(slot for layout in for_want_of_buckets for slot in layout.slots)
    return fitted


def with_tables_apart(recipe: Recipe, module: nn.Module, trained: Collection[str]) -> Recipe:
    """``recipe`` with parameters over a vocabulary by its recipe for tables, if the model has others too."""
    tables = [name for name in tables_of(module) if name in trained]
    return route_tables(recipe, tables) if len(tables) < len(trained) else recipe


def tables_of(module: nn.Module) -> list[str]:
    """The parameters over a vocabulary: embeddings, and the layers that predict what they stand for.

    In one step most of their gradient is next to nothing, where a batch has no such word, and the rest is
    large, which neither the mean magnitude of a block nor a few directions tell: see docs/fidelity.md.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    # Sparse gradients are not compressed.
    tables = [m for m in module.modules() if isinstance(m, kinds) and not m.sparse]
    chosen = {id(p) for m in (*tables, *_heads(module, tables)) for p in m.parameters()}
    return [canonical_name(name) for name, p in module.named_parameters() if id(p) in chosen]


def _heads(module: nn.Module, tables: Sequence[nn.Embedding | nn.EmbeddingBag]) -> list[nn.Linear]:
    """The layers that predict what ``tables`` stand for: with as many outputs as one of them has rows.

    Layers within the model may have as many, above all as there are places in a text: then something else
    takes that many inputs, or they are more than the tables. Of those, a head is one whose weight is a
    table's own, or the model's last layer if it has a table's shape.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    num_tables = Counter(table.num_embeddings for table in tables)
    num_layers = Counter(layer.out_features for layer in layers)
    taken = {size for p in module.parameters() for size in p.shape[1:]}
    within = {size for size in num_tables if size in taken or num_layers[size] > num_tables[size]}

    def is_head(layer: nn.Linear) -> bool:
        if layer.out_features not in within:
            return layer.out_features in num_tables
        is_last = layer is layers[-1]
        return any(
            layer.weight is table.weight or (is_last and layer.weight.shape == table.weight.shape)
            for table in tables
        )

    return [layer for layer in layers if is_head(layer)]


def require_averaging(recipe: Recipe, why: str) -> None:
    """ValueError if some gradients stay each rank's own, at any time."""
    if not all(each.exchange.communicates for each in recipe.plain()):
        raise ValueError(f"{recipe} leaves every rank its own gradients, so {why}")


def own_node_size(group: dist.ProcessGroup) -> int:
    """How many ranks this one's node has, if its launcher says so and it sits where neighbours would.

    1 if not, and where some ranks of the world are not in the group.
    """
    size, rank = group.size(), group.rank()
    for names in _LAUNCHERS:
        said = [os.environ.get(name, "") for name in names]
        if all(text.isdecimal() for text in said):
            local_size, local_rank = map(int, said)
            is_even = 0 < local_size < size == dist.get_world_size() and size % local_size == 0
            return local_size if is_even and local_rank == rank % local_size else 1
    return 1


def common_node_size(own: Iterable[str]) -> int:
    """The size of every node, from what each rank says of its own; 1, for one level, where they differ.

    >>> common_node_size(["2", "2", "2", "2"]), common_node_size(["2", "1", "1", "2"])
    (2, 1)
    """
    sizes = set(own)
    return int(sizes.pop()) if len(sizes) == 1 else 1


def kernels_of(recipe: Recipe, group: dist.ProcessGroup) -> frozenset[Family]:
    """What a recipe computes with if all ranks find that their nodes are as this one says."""
    return with_node_size(recipe, own_node_size(group)).exchange.kernels


def agree_on_nodes(recipe: Recipe, call: CollectiveCall, claim: Claim) -> Recipe:
    """Agree on ``claim`` with every rank, and return ``recipe`` for the node size that all ranks see."""
    said = call.agree(claim, own=str(own_node_size(call.group)))
    return with_node_size(recipe, common_node_size(said))
