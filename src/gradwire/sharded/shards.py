"""The shards of parameters that this rank holds, for those who average parameters instead of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.ddp import local_part
from gradwire.sharded.model import ShardedModel


class ShardLayouts:
    """Layouts of buckets that hold the shards of a model's parameters."""

    def __init__(self, model: ShardedModel) -> None:
        parameters = [each for unit in model.units for each in unit.parameters]
        self._known = {id(each.parameter): each for each in parameters}

    def make(self, index: int, dtype: torch.dtype, parameters: Sequence[Tensor]) -> BucketLayout:
        """Return the layout of a bucket that holds the shards of ``parameters``, each with its padding.

        Raises ValueError if one of them is not sharded.
        """
        for parameter in parameters:
            if id(parameter) not in self._known:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not sharded, so nothing keeps it the "
                    "same on the ranks of a site: call fully_shard on the whole model too"
                )
        return BucketLayout.packed(index, dtype, [self._known[id(each)].slot() for each in parameters])


def is_shard(tensor: Tensor) -> bool:
    """Return True if this rank holds a shard of a tensor: if it is a ``DTensor``."""
    return hasattr(tensor, "to_local")


def local_values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that this rank holds, to read and to write: all, or its shard's."""
    return local_part(tensor.detach())


def shard_like(parameter: Any, values: Tensor) -> Tensor:
    """Return the values of a parameter's shard as a ``DTensor``, in a copy; others as they are."""
    if not is_shard(parameter):
        return values
    from torch.distributed.tensor import DTensor  # here, since it takes a second

    made: Tensor = DTensor.from_local(
        values.clone(),  # torch.save takes no DTensor that begins inside its storage
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def cut_like(parameter: Any, saved: Tensor) -> Tensor:
    """Return this rank's values of a saved tensor, which is whole or a shard."""
    if is_shard(saved) or not is_shard(parameter):
        return local_values(saved)
    coordinate = parameter.device_mesh.get_coordinate()
    for mesh_dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            dim, rows = placement.dim, parameter.shape[placement.dim]
            size = -(-rows // parameter.device_mesh.size(mesh_dim))
            first = min(coordinate[mesh_dim] * size, rows)
            saved = saved.narrow(dim, first, min(size, rows - first))
    return saved


def whole_tensor(tensor: Any) -> Tensor:
    """Return all values of a tensor of which ranks hold shards; collective."""
    whole: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor
    return whole
