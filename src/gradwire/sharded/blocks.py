"""Models before they are sharded: parts to shard by themselves, meshes, and the buckets that will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.buckets import BucketLayout, Slot, canonical_name, row_by_row, shard_shape


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard by themselves: members of its lists and sequences that have parameters.

    >>> blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    containers = (each for each in model.modules() if isinstance(each, nn.Sequential | nn.ModuleList))
    members = dict.fromkeys(member for container in containers for member in container)
    without_forward = nn.ModuleList | nn.ModuleDict
    return [m for m in members if any(True for _ in m.parameters()) and not isinstance(m, without_forward)]


def shard_blocks(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard every block of a model by itself, and the rest with the whole."""
    # Imported here, since it takes a second.
    from torch.distributed.fsdp import fully_shard

    for block in reversed(blocks_of(model)):  # inner ones first: a block takes what is not sharded yet
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def replica_mesh(num_replicas: int, device: torch.device, backend: str) -> DeviceMesh:
    """Return a mesh of all ranks, in replicas of consecutive ones, over new groups; collective."""
    ranks = torch.arange(dist.get_world_size()).view(num_replicas, -1)
    groups = []
    for rows in (ranks.t().tolist(), ranks.tolist()):
        made = [(row, dist.new_group(row, backend=backend)) for row in rows]
        groups.append(next(own for row, own in made if dist.get_rank() in row))
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def unit_parameters(model: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each unit that `shard_blocks` makes, by name; those of the root first.

    Raises ValueError for a scalar, which ``fully_shard`` does not take.

    >>> [list(unit) for unit in unit_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))]
    [[], ['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """
    owners: dict[int, int] = {}
    blocks = blocks_of(model)
    for number, block in enumerate(blocks, start=1):  # outer ones come before those inside them
        owners.update((id(parameter), number) for parameter in block.parameters())
    units: list[dict[str, nn.Parameter]] = [{} for _ in (model, *blocks)]
    for name, parameter in model.named_parameters():
        if not parameter.shape:
            raise ValueError(f"fully_shard takes no scalars: make {name} a tensor of one dimension")
        units[owners.get(id(parameter), 0)][canonical_name(name)] = parameter
    return units


def shard_layout(
    index: int,
    shapes: Mapping[str, Sequence[int]],
    num_shards: int,
    num_parts: int = 1,
    dtype: torch.dtype = torch.float32,
) -> BucketLayout:
    """Return the layout of a shard of these parameters, or of ``num_parts`` shards one after the other."""
    slots = []
    for name, whole in shapes.items():
        first, *more = shard_shape(whole, 0, num_shards)
        shape = torch.Size([num_parts * first, *more])
        slots.append(Slot(name, 0, shape, row_by_row(shape), torch.Size(whole)))
    return BucketLayout.packed(index, dtype, slots, num_parts)
