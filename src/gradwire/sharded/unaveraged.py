"""Warnings of gradients that neither torch nor gradwire averages."""

from __future__ import annotations

import logging
from typing import Any

from gradwire.peers import world_ranks
from gradwire.sharded.model import ShardedModel
from gradwire.torch_private import fsdp

log = logging.getLogger("gradwire")


def warn_of_unaveraged(sharded: ShardedModel) -> None:
    """Log the parameters that nobody averages, and the ranks over which nobody does, once for all ranks."""
    if sharded.rank != 0:
        return
    if left_out := sharded.left_out():
        log.warning(
            "fully_shard has left out %d trained parameter(s), such as %s: neither torch nor gradwire "
            "averages their gradients, and ranks drift apart. Call fully_shard on the whole model too, "
            "before attach, unless you average them yourself",
            len(left_out),
            left_out[0],
        )
    if not sharded.has_replicas:
        _warn_of_wider_mesh(sharded)


def _warn_of_wider_mesh(sharded: ShardedModel) -> None:
    """Log that the model's mesh is a part of another, if that has ranks that hold no part of the model."""
    mesh = fsdp.root_mesh_of(sharded.units[0].group)
    place = None if mesh is None else mesh.get_coordinate()
    if place is None or any(place):
        return
    ranks = _ranks_of_model(sharded)
    along = [mesh.mesh[(*place[:dim], slice(None), *place[dim + 1 :])].tolist() for dim in range(len(place))]
    if all(ranks.issuperset(line) for line in along):
        return
    log.warning(
        "the model is sharded over %d of the %d ranks of its device mesh%s, and its gradients are not "
        "averaged over the others. If those hold replicas of its shards, pass the ranks that hold the same "
        "shard: gradwire.attach(model, recipe, replicas=mesh['replicate']). If they hold other parts of the "
        "model, as in a pipeline, or you average over them yourself, nothing is missing",
        len(ranks),
        mesh.mesh.numel(),
        _describe_dimensions(mesh),
    )


def _ranks_of_model(sharded: ShardedModel) -> set[int]:
    """Return the ranks that share a parameter with this one: by ``fully_shard``, or by tensor parallelism."""
    ranks = set(world_ranks(sharded.shards))
    for parameter in sharded.root.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            ranks.update(mesh.mesh.flatten().tolist())
    return ranks


def _describe_dimensions(mesh: Any) -> str:
    """Return the names and sizes of a mesh's dimensions in parentheses; an empty text if they have none."""
    if mesh.mesh_dim_names is None:
        return ""
    sizes = zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)
    return f" ({', '.join(f'{name}={size}' for name, size in sizes)})"
