"""The private side of torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
