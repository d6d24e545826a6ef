"""A recipe as a model and its ranks take it."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.exchanges import Route
from gradwire.layout import Layouts, canonical_name
from gradwire.models import trained
from gradwire.recipes import Recipe, apart, placed


def fit(recipe: Recipe, ddp: DistributedDataParallel) -> Recipe:
    """``recipe`` as this model and its ranks take it; ValueError if they cannot."""
    group = ddp.process_group
    parameters = trained(ddp)
    fitted = placed(with_tables_apart(recipe, ddp.module, parameters), _local_size(group))
    for each in fitted.plain():
        if group.size() % (each.local_size or 1):
            raise ValueError(f"recipe {each}: {group.size()} ranks cannot be nodes of {each.local_size}")
    if isinstance(fitted.exchange, Route):
        for_want_of_buckets = Layouts(ddp.module).guess(list(parameters.values()))
        fitted.exchange.check(slot for layout in for_want_of_buckets for slot in layout.slots)
    return fitted


def with_tables_apart(recipe: Recipe, module: nn.Module, trained: Collection[str]) -> Recipe:
    """``recipe`` with parameters over a vocabulary by its recipe for tables, if the model has others too."""
    tables = [name for name in tables_of(module) if name in trained]
    return apart(recipe, tables) if len(tables) < len(trained) else recipe


def tables_of(module: nn.Module) -> list[str]:
    """The parameters over a vocabulary: embedding tables, and what has their shape or their length.

    Such are the weight and the bias of the layer that predicts what an embedding stands for. In one step
    most of their gradient is next to nothing, where a batch has no such word, and the rest is large, which
    neither the mean magnitude of a block nor a few directions tell: see docs/fidelity.md.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    # Sparse gradients are not compressed.
    tables = [m.weight for m in module.modules() if isinstance(m, kinds) and not m.sparse]
    shapes = {table.shape for table in tables} | {table.shape[:1] for table in tables}
    return [canonical_name(name) for name, p in module.named_parameters() if p.shape in shapes]


def require_averaging(recipe: Recipe, why: str) -> None:
    """ValueError if some gradients stay each rank's own, at any time."""
    if not all(each.exchange.communicates for each in recipe.plain()):
        raise ValueError(f"{recipe} leaves every rank its own gradients, so {why}")


def _local_size(group: dist.ProcessGroup) -> int:
    """How many ranks a node has, if the launcher says so and all ranks of the world are in the group."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or "1"
    size, world_size = int(said), group.size()
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", world_size // size))
    is_even = num_nodes > 1 and size * num_nodes == world_size == dist.get_world_size()
    # Ranks of a node must be neighbours.
    is_in_place = int(os.environ.get("LOCAL_RANK", group.rank() % size)) == group.rank() % size
    return size if is_even and is_in_place else 1
