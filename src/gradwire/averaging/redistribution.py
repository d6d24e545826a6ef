"""The tensors of a saved state on the ranks that load it, whatever their numbers of replicas and shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.averaging.grid import Grid
from gradwire.averaging.state_fields import Fields, States
from gradwire.buckets import is_gradient_state, shard_shape
from gradwire.recipes import Reduction


def memory_of(
    fields: Fields,
    rank: int,
    grid: Grid,
    shapes: Mapping[str, torch.Size],
    shard_dims: Mapping[str, int],
    reduction: Reduction,
) -> States:
    """Return the tensors of one rank of ``grid``; ValueError if a rank's tensors are missing or wrong.

    Residuals and velocities on another number of shards are cut anew from those of whole parameters, whose
    ``shapes`` are given. Low-rank factors fit one shard alone, so they start anew.
    """
    saved, shard = fields.grid, rank % grid.num_shards
    if saved == grid:
        return _tensors(fields, rank, grid)
    if not fields.entries:
        return {}  # nothing was held back on any rank
    if saved.num_shards == grid.num_shards:
        memories = [_tensors(fields, each, grid) for each in saved.holders(shard)]
    else:
        memories = []
        for number in range(saved.num_replicas):
            parts = [_tensors(fields, each, grid) for each in saved.replica(number)]
            memories.append(_cut(parts, shard, grid.num_shards, shapes, shard_dims))
    return _spread(memories, grid.num_replicas, reduction)


def _tensors(fields: Fields, rank: int, grid: Grid) -> States:
    """Return the tensors of one saved rank; ValueError if one is missing, unknown or of another shape."""
    saved, expected = fields.grid, fields.entries
    states = fields.memory.get(rank, {})
    if expected and not states:
        why = (
            f"; it was saved on {_words(saved)} and this model has {_words(grid)}, so the states of all of "
            "them are needed: see gradwire.merge_state_dicts"
            if saved != grid
            else "; each rank loads its own state. To save on one rank alone, save what "
            "state_dict(gather=True) returns, called on every rank"
        )
        there_are = [saved.name(each) for each in sorted(fields.memory)]
        raise ValueError(f"the state has no {saved.name(rank)!r}, only {there_are}{why}")
    there = {(key, name): tensor for key, tensors in states.items() for name, tensor in tensors.items()}
    for key, name in expected.keys() - there.keys():
        raise ValueError(f"the state of rank {rank} has no {key} of parameter {name!r}, which was saved")
    for key, name in there.keys() - expected.keys():
        raise ValueError(f"the state of rank {rank} has a {key} of parameter {name!r} that was not saved")
    for (key, name), tensor in there.items():
        if tuple(tensor.shape) != expected[key, name]:
            raise ValueError(
                f"the {key} of parameter {name!r} of rank {rank} has shape {tuple(tensor.shape)}, but was "
                f"saved with shape {expected[key, name]}"
            )
    return states


def _words(grid: Grid) -> str:
    if grid.num_shards == 1:
        return f"{grid.world_size} ranks"
    return f"{grid.world_size} ranks with {grid.num_shards} shards"


def _cut(
    parts: Sequence[States],
    shard: int,
    num_shards: int,
    shapes: Mapping[str, torch.Size],
    shard_dims: Mapping[str, int],
) -> States:
    """Return the residuals and velocities of one of ``num_shards`` shards, made from all saved shards."""
    cut: dict[str, dict[str, Tensor]] = {}
    for key in parts[0]:
        if not is_gradient_state(key):
            continue
        for name in parts[0][key]:
            dim, rows = shard_dims.get(name, 0), shapes[name][shard_dims.get(name, 0)]
            whole = torch.cat([part[key][name] for part in parts], dim).narrow(dim, 0, rows)
            size = shard_shape(shapes[name], dim, num_shards)[dim]
            own = whole.narrow(dim, min(shard * size, rows), min(size, max(rows - shard * size, 0)))
            padding = whole.new_zeros([*own.shape[:dim], size - own.shape[dim], *own.shape[dim + 1 :]])
            cut.setdefault(key, {})[name] = torch.cat([own, padding], dim)
    return cut


def _spread(memories: Sequence[States], num_replicas: int, reduction: Reduction) -> States:
    """Return the states of each of ``num_replicas`` new replicas, made from those of all saved ones.

    Together, the new ones hold back as much as the saved ones did. A residual or a velocity is in units of a
    rank's own gradient. In a mean over W ranks it counts for 1/W, so each new rank gets the mean of the saved
    ones. In a sum it counts in full, so each new rank gets an equal share of their sum. Other states, such as
    factors, are every rank's estimate of the same thing, so each new rank gets their mean.
    """
    spread: dict[str, dict[str, Tensor]] = {}
    for key, tensors in memories[0].items():
        is_share = reduction == "sum" and is_gradient_state(key)
        for name, first in tensors.items():
            wide = torch.complex128 if first.is_complex() else torch.float64
            total = torch.stack([memory[key][name].to(wide) for memory in memories]).sum(0)
            total /= num_replicas if is_share else len(memories)
            spread.setdefault(key, {})[name] = total.to(first.dtype)
    return spread
