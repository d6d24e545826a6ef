"""Private names of ``fully_shard``: what torch does not tell those who replace its communication."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Rows of `PRIVATE_NAMES`: most are of torch's FSDPParamGroup, and of its FSDPParam.
FSDP_NAMES = (
    *(
        (f"param_group:{name}", purpose, "refuse sharded models")
        for name, purpose in {
            "fsdp_params": "the order in which gradients are reduced",
            "mesh_info": "the ranks that hold shards",
            "post_forward_mesh_info": "takes replicas over from torch",
            "device": "the device of gradients",
            "all_reduce_grads": "knows the last micro-batch",
            "gradient_divide_factor": "knows who divides",
            "_reduce_scatter_comm": "finds a reduce-scatter of the user's",
            "_all_reduce_hook": "finds a hook of the user's",
        }.items()
    ),
    ("param_group:_all_gather_comm", "finds an all-gather of the user's", "refuse weights="),
    ("param_group:_all_gather_result", "forgets a gather that failed", "let its next use fail too"),
    *(
        (f"fsdp_param:{name}", "the layout of reduced gradients", "refuse sharded models")
        for name in (
            "mp_policy",
            "sharded_param",
            "sharded_size",
            "padded_sharded_param_size",
            "offload_to_cpu",
            "fsdp_placement",
            "_orig_size",
            "_module_info",
        )
    ),
    ("sharded:_get_fsdp_state", "finds the groups of parameters", "refuse sharded models"),
    ("fsdp_state:_fsdp_param_groups", "the groups of parameters", "refuse sharded models", (2, 12), None),
    ("fsdp_state:_fsdp_param_group", "the group of parameters", "refuse sharded models", None, (2, 12)),
    ("param_group:_orig_dtype", "the dtype of gradients", "that of the parameters", None, (2, 15)),
    ("torch:Tensor._post_accumulate_grad_hooks", "refuses optimizers in backward()", "no such check"),
    (
        "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
        "warns of replicas that nobody averages",
        "no such warning",
        (2, 10),
        None,
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo",
        "takes replicas over from torch",
        "refuse HSDP models",
        (2, 6),
        None,
    ),
)


def fsdp_module_kind() -> type | None:
    """Return the class of sharded modules; None if no module can be sharded yet."""
    found: type | None = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return found


def param_groups(module: Any) -> Sequence[Any]:
    """Return the ``FSDPParamGroup`` objects of a sharded module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def whole_shape(fsdp_param: Any) -> torch.Size:
    """Return the shape of a parameter before it was sharded."""
    shape: torch.Size = fsdp_param._orig_size
    return shape


def shard_dim(fsdp_param: Any) -> int:
    """Return the dimension in which a parameter is cut into shards."""
    dim: int = fsdp_param.fsdp_placement.dim
    return dim


def owner_of(fsdp_param: Any) -> tuple[Any, str]:
    """Return the module that has a parameter, and the parameter's name in it."""
    info = fsdp_param._module_info
    return info.module, info.param_name


def gradient_dtype(param_group: Any) -> torch.dtype | None:
    """Return the dtype of a group's gradients; None before the first forward pass, or if it has several."""
    if hasattr(param_group, "_orig_dtype"):  # before torch 2.15
        dtype: torch.dtype | None = param_group._orig_dtype
        return dtype
    trained = [each for each in param_group.fsdp_params if each.sharded_param.requires_grad]
    dtypes = {getattr(each, "sharded_grad_dtype", None) for each in trained}
    return dtypes.pop() if len(dtypes) == 1 else None


def gather_dtype(fsdp_param: Any) -> torch.dtype:
    """Return the dtype in which torch gathers a parameter."""
    dtype: torch.dtype = fsdp_param.mp_policy.param_dtype or fsdp_param.sharded_param.dtype
    return dtype


def reduce_dtype(fsdp_param: Any) -> torch.dtype:
    """Return the dtype in which torch reduces a parameter's gradient."""
    policy = fsdp_param.mp_policy
    # From torch 2.15 on, gradients are not reduced in the dtype of the computation.
    computed = None if hasattr(type(fsdp_param), "unsharded_grad_dtype") else policy.param_dtype
    dtype: torch.dtype = policy.reduce_dtype or computed or fsdp_param.sharded_param.dtype
    return dtype


def divisor_of_sums(param_group: Any, dtype: torch.dtype, num_ranks: int) -> float:
    """Return what torch divides sums over ranks by, after they are scattered.

    Sums in other dtypes than fp32 and bf16 may overflow. So it divides by a part of the divisor before: the
    first power of two that is not less than its root, or by which it cannot be divided.
    """
    divisor = float(param_group.gradient_divide_factor or num_ranks)
    if dtype in (torch.float32, torch.bfloat16):
        return divisor
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return divisor / before


def reduce_scatter_of(param_group: Any) -> Any:
    """Return the object that reduces and scatters a group's gradients."""
    return param_group._reduce_scatter_comm


def all_gather_of(param_group: Any) -> Any:
    """Return the object that gathers a group's parameters; None in a torch that has none."""
    return getattr(param_group, "_all_gather_comm", None)


def forget_gather(param_group: Any) -> None:
    """Let the group gather its parameters anew, if it waits for a gather now."""
    param_group._all_gather_result = None


def gathers_twice(param_group: Any) -> bool:
    """Return True if parameters are freed after the forward pass, and gathered again for the backward."""
    return param_group.post_forward_mesh_info is not None


def all_reduce_hook_of(param_group: Any) -> Any:
    """Return the hook that takes a group's gradients after they are scattered; None if there is none."""
    return param_group._all_reduce_hook


def has_accumulation_hooks(parameter: Any) -> bool:
    """Return True if hooks run when the parameter's gradient is accumulated."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def shard_group_of(param_group: Any) -> dist.ProcessGroup:
    """Return the ranks that hold the shards."""
    group: dist.ProcessGroup = param_group.mesh_info.shard_process_group
    return group


def replicate_group_of(param_group: Any) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shard, if torch averages over them itself (HSDP)."""
    found: dist.ProcessGroup | None = getattr(param_group.mesh_info, "replicate_process_group", None)
    return found


def root_mesh_of(param_group: Any) -> Any:
    """Return the mesh from which that of the shards was cut, or that mesh itself; None in an older torch."""
    find_root = getattr(param_group.mesh_info.mesh, "_get_root_mesh", None)
    return None if find_root is None else find_root()


def take_over_replicas(param_group: Any) -> Callable[[], None]:
    """Keep torch from averaging a group's gradients over replicas; return what undoes that.

    torch all-reduces if the mesh of the group has a dimension of replicas. So the group gets one without it,
    over the same ranks. Parameters and gradients keep theirs, and stay what optimizers and checkpoints know.
    """
    info, after_forward = param_group.mesh_info, param_group.post_forward_mesh_info
    param_group.mesh_info = _without_replicas(info)
    if after_forward is not None and after_forward == info:
        param_group.post_forward_mesh_info = param_group.mesh_info

    def undo() -> None:
        if param_group.post_forward_mesh_info is param_group.mesh_info:
            param_group.post_forward_mesh_info = info
        param_group.mesh_info = info

    return undo


def _without_replicas(info: Any) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    made = FSDPMeshInfo(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim)
    for name in ("dp_mesh_dims", "spmd_mesh", "is_spmd_mesh", "reduce_scatter_process_group"):
        if hasattr(info, name):
            setattr(made, name, getattr(info, name))
    return made
