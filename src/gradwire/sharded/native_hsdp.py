"""Models that were sharded over a two-dimensional mesh, which torch averages over replicas itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.sharded.units import Unit


def take_over(unit: Unit) -> Callable[[], None]:
    """Keep torch from averaging a unit over its replicas; return what undoes that.

    torch all-reduces if the mesh of the unit has a dimension of replicas. So the unit gets one without it,
    over the same ranks. Parameters and gradients keep theirs, and stay what optimizers and checkpoints know.
    """
    group = unit.group
    info, after_forward = group.mesh_info, group.post_forward_mesh_info
    group.mesh_info = _without_replicas(info)
    if after_forward is not None and after_forward == info:
        group.post_forward_mesh_info = group.mesh_info

    def undo() -> None:
        if group.post_forward_mesh_info is group.mesh_info:
            group.post_forward_mesh_info = info
        group.mesh_info = info

    return undo


def _without_replicas(info: Any) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    made = FSDPMeshInfo(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim)
    for name in ("dp_mesh_dims", "spmd_mesh", "is_spmd_mesh", "reduce_scatter_process_group"):
        if hasattr(info, name):
            setattr(made, name, getattr(info, name))
    return made
