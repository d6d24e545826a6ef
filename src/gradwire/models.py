"""What has to be known of a model before its gradients can be averaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import fingerprint
from gradwire.exchanges import Route
from gradwire.hook_runner import hook_name
from gradwire.layout import Layouts, canonical_name
from gradwire.recipes import Recipe, apart, placed


def unwrap(model: nn.Module) -> DistributedDataParallel:
    """The ``DistributedDataParallel`` that ``model`` is or compiles; TypeError if it is none."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile(ddp)
    if isinstance(inner, DistributedDataParallel):
        return inner
    hint = ""
    if isinstance(getattr(inner, "module", None), DistributedDataParallel):
        hint = "; its .module is one: attach to that"
    elif isinstance(inner, nn.Module):
        hint = "; wrap the model first"
    raise TypeError(f"gradwire takes a DistributedDataParallel, not {type(inner).__name__}{hint}")


def device_of(ddp: DistributedDataParallel) -> torch.device:
    """Where the model's gradients are."""
    device: torch.device = next(p.device for p in ddp.module.parameters() if p.requires_grad)
    return device


def trained(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that lie in buckets, by name."""
    return {name: p for name, p in _not_ignored(ddp).items() if p.requires_grad}


def in_buckets(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """`trained`, and if some were frozen when DDP had made its buckets, all that may lie in those."""
    now = trained(ddp)
    was_frozen_later = len(now) != ddp._get_ddp_logging_data()["num_parameter_tensors"]
    return _not_ignored(ddp) if was_frozen_later else now


def _not_ignored(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    ignored = ddp.parameters_to_ignore
    return {canonical_name(name): p for name, p in ddp.module.named_parameters() if name not in ignored}


def claim_of(ddp: DistributedDataParallel, chosen: Recipe | Callable[..., Any]) -> dict[str, str]:
    """What must be the same on every rank that averages this model so."""
    what = fingerprint.of_recipe(chosen) if isinstance(chosen, Recipe) else {"hook": hook_name(chosen)}
    return {
        **fingerprint.of_version(),
        **what,
        "find_unused_parameters": str(ddp.find_unused_parameters),
        "static_graph": str(ddp.static_graph),
        **fingerprint.of_parameters(trained(ddp).items()),
    }


def require_averaging(recipe: Recipe, why: str) -> None:
    """ValueError if some gradients stay each rank's own, at any time."""
    if not all(each.exchange.communicates for each in recipe.plain()):
        raise ValueError(f"{recipe} leaves every rank its own gradients, so {why}")


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


def num_transient(ddp: DistributedDataParallel) -> int:
    """After how many steps DDP rebuilds its buckets; 0 if never, or if buckets cannot wait for others."""
    if ddp.mixed_precision is not None:
        return 0  # its hook waits for one bucket before it takes the next
    if ddp.static_graph:
        return 2
    return 0 if ddp.find_unused_parameters else 1


def _local_size(group: dist.ProcessGroup) -> int:
    """How many ranks a node has, if the launcher says so and all ranks of the world are in the group."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or "1"
    size, world_size = int(said), group.size()
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", world_size // size))
    is_even = num_nodes > 1 and size * num_nodes == world_size == dist.get_world_size()
    # Ranks of a node must be neighbours.
    is_in_place = int(os.environ.get("LOCAL_RANK", group.rank() % size)) == group.rank() % size
    return size if is_even and is_in_place else 1


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
