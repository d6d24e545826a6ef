"""Steps of a ``ZeroRedundancyOptimizer`` that overlap with the backward pass, on Gloo and NCCL.

Each rank steps the parameters that it owns, bucket by bucket, and sends them to the others. Owners are chosen
by parameter, before the first step. So no step is lost while DDP rebuilds its buckets, and no optimizer state
is held twice. DDP inspects the annotations of a hook, so this module keeps them as objects.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.buckets import Layouts
from gradwire.ddp import (
    Bridge,
    HookInfo,
    HookRunner,
    SteppingRunner,
    hook_name,
    hook_with_bridge,
    num_bucketed,
    open_raw_lane,
    step_parameters,
)
from gradwire.ddp_comm_hooks.default_hooks import Hook
from gradwire.peers import Group, backend_name, gather, own_world_rank
from gradwire.torch_private import (
    GradBucket,
    optimizer_class,
    zero_constructor,
    zero_device,
    zero_overlaps,
    zero_parameters,
    zero_share,
    zero_sync,
)

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

# DDP's default bucket size. It decides which rank owns which parameter, and does not change results.
_BUCKET_BYTES = 25 << 20


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return a hook that runs ``hook``, and steps the optimizer once the last bucket has arrived.

    Args:
        hook: any hook that averages gradients.
        ddp: the model.
        zero: the optimizer, made with ``overlap_with_ddp=True``; its ``step()`` does nothing.
        shard_buckets: balance ranks by the size of single parameters, not of whole buckets.

    Raises ValueError if ``zero`` does not overlap, or has other ranks than the model.
    """
    return _zero_hook(hook, ddp, zero, shard_buckets, at_the_end=True)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return a hook that runs ``hook``, and steps each bucket's parameters once it is averaged.

    Arguments and errors are those of `hook_with_zero_step`.
    """
    return _zero_hook(hook, ddp, zero, shard_buckets, at_the_end=False)


def _zero_hook(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: Any,  # torch's stubs lack most of its attributes
    shard_buckets: bool,
    at_the_end: bool,
) -> Hook:
    group: dist.ProcessGroup = ddp.process_group
    _check(group, zero)
    owners = _owners(zero, shard_buckets)
    _initialize(zero, owners)
    ddp_ref, num_parameters = weakref.ref(ddp), num_bucketed(ddp)

    def step(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], group: Group) -> None:
        # A scheduler changes only the param groups that the user sees.
        zero_sync(zero)
        mine = [i for i, p in enumerate(parameters) if owners.get(p) == zero.rank]
        if mine:
            step_parameters(zero.optim, [parameters[i] for i in mine], [gradients[i] for i in mine])
        _send_parameters([[p for p in parameters if owners.get(p) == r] for r in range(group.size)], group)

    def open_bridge(state: Any, bucket: GradBucket) -> Bridge:
        model = ddp_ref()
        assert model is not None, "only the model's reducer calls its hook"
        lane = open_raw_lane(model.process_group, bucket)
        runner = SteppingRunner(HookRunner(hook, state), lane, step, at_the_end=at_the_end)
        layouts, rank = Layouts(model.module), own_world_rank(model.process_group)
        return Bridge(runner, layouts, rank, num_parameters=num_parameters)

    return hook_with_bridge(open_bridge, f"zero_step({hook_name(hook)})", HookInfo(wraps=hook))


def _check(group: dist.ProcessGroup, zero: Any) -> None:
    if not zero_overlaps(zero):
        raise ValueError(
            "the ZeroRedundancyOptimizer must be made with overlap_with_ddp=True to step in a hook"
        )
    if dist.get_process_group_ranks(zero.process_group) != dist.get_process_group_ranks(group):
        raise ValueError(
            "the ZeroRedundancyOptimizer and the model have different process groups; make both with the same"
        )
    device = zero_device(zero)
    if device.type == "cuda" and backend_name(group, device) != "nccl":
        raise ValueError(
            "a model on CUDA needs an NCCL group to send stepped parameters; make the model with one"
        )


def _owners(zero: Any, shard_buckets: bool) -> dict[torch.Tensor, int]:
    """Return the rank that steps each parameter, the same on all ranks."""
    # Backward computes gradients, and so DDP fills buckets, from the last parameter to the first.
    parameters = zero_parameters(zero)[::-1]
    if shard_buckets:
        sizes, owners = [0] * zero.world_size, {}
        for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            rank = sizes.index(min(sizes))
            owners[parameter] = rank
            sizes[rank] += parameter.numel()
        return owners
    owners, bucket, filled_bytes = {}, 0, 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if filled_bytes and filled_bytes + num_bytes > _BUCKET_BYTES:
            bucket, filled_bytes = bucket + 1, 0
        owners[parameter] = bucket % zero.world_size
        filled_bytes += num_bytes
    return owners


def _initialize(zero: Any, owners: dict[torch.Tensor, int]) -> None:
    """Give ``zero`` an inner optimizer for the parameters of this rank; schedulers and checkpoints use it."""
    kind = optimizer_class(zero_constructor(zero))
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ValueError(
            f"{zero_constructor(zero)} corresponds to no torch.optim.Optimizer, which gradwire needs to step"
        )
    zero_share(zero, kind, owners)


def _send_parameters(shares: list[list[torch.Tensor]], group: Group) -> None:
    """Send stepped parameters to all ranks; ``shares[r]`` are the parameters that rank r has stepped."""
    first = next((p for share in shares for p in share), None)
    if group.size == 1 or first is None:  # the optimizer may hold only a part of the model
        return
    flats = [first.new_empty(sum(p.numel() for p in share)) for share in shares]
    for parameter, part in _parts(shares[group.rank], flats[group.rank]):
        part.copy_(parameter.detach())
    gather([flat.view(torch.uint8) for flat in flats], group)
    for rank, (share, flat) in enumerate(zip(shares, flats, strict=True)):
        if rank != group.rank:
            for parameter, part in _parts(share, flat):
                parameter.detach().copy_(part)


def _parts(parameters: list[torch.Tensor], flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sizes = [parameter.numel() for parameter in parameters]
    return [(p, part.view(p.shape)) for p, part in zip(parameters, flat.split(sizes), strict=True)]
