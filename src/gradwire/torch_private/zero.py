"""Private names of ZeroRedundancyOptimizer, and of the optimizers that it makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Rows of `PRIVATE_NAMES`.
ZERO_NAMES = tuple(
    (path, "steps inside a hook", "refuse ZeRO steps in hooks")
    for path in (
        "zero:_overlap_with_ddp",
        "zero:_default_device",
        "zero:_all_params",
        "zero:_optim_constructor",
        "zero:_optim_defaults",
        "zero:_overlap_info",
        "zero:_clear_cache",
        "zero:_partition_parameters_cache",
        "zero:_partition_param_group",
        "zero:_sync_param_groups",
        "torch.distributed.optim.zero_redundancy_optimizer:_OverlapStatus",
        "torch.distributed.optim.utils:functional_optim_map",
    )
)


def zero_overlaps(zero: Any) -> bool:
    """Return True if the optimizer was made with ``overlap_with_ddp=True``."""
    return bool(zero._overlap_with_ddp)


def zero_device(zero: Any) -> torch.device:
    """Return the device of the optimizer's parameters."""
    device: torch.device = zero._default_device
    return device


def zero_parameters(zero: Any) -> list[Tensor]:
    """Return all parameters of the optimizer, those of other ranks too."""
    return list(zero._all_params)


def zero_constructor(zero: Any) -> Any:
    """Return the class that the optimizer makes for the parameters of this rank."""
    return zero._optim_constructor


def zero_share(zero: Any, kind: Any, owners: dict[Tensor, int]) -> None:
    """Give each rank its own parameters, and this rank an optimizer of class ``kind`` for them."""
    from torch.distributed.optim.zero_redundancy_optimizer import _OverlapStatus

    zero._clear_cache()
    zero._partition_parameters_cache = [[] for _ in range(zero.world_size)]
    for group in zero.param_groups:
        shares = [[p for p in group["params"] if owners[p] == rank] for rank in range(zero.world_size)]
        zero._partition_param_group(group, shares)
    zero.optim = kind(zero._partition_parameters_cache[zero.rank], **zero._optim_defaults)
    zero._sync_param_groups(zero.optim.param_groups, zero.param_groups)
    zero._overlap_info.status = _OverlapStatus.INITIALIZED


def zero_sync(zero: Any) -> None:
    """Copy learning rates and the like from the groups that the user sees to the inner optimizer."""
    zero._sync_param_groups(zero.param_groups, zero.optim.param_groups)


def optimizer_class(functional: Any) -> Any:
    """Return the optimizer whose functional form is ``functional``, or None."""
    from torch.distributed.optim.utils import functional_optim_map

    return {made: kind for kind, made in functional_optim_map.items()}.get(functional)
