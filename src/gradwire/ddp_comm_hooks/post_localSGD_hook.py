"""Post-local SGD: average gradients over all ranks for a while, then only within each machine.

The caller averages parameters, for example with torch's ``PostLocalSGDOptimizer``. `gradwire.LocalSGD`
does both.
"""

import logging
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as upstream
from torch.futures import Future

from gradwire.ddp_comm_hooks._raw import group_or_world, run_recipe
from gradwire.lanes import completed
from gradwire.peers import backend_name, limited_store, next_rendezvous, timeout_of
from gradwire.recipes import fp32
from gradwire.torch_private import GradBucket

log = logging.getLogger("gradwire")

_GROUPS = ("process_group", "subgroup")


class PostLocalSGDState(upstream.PostLocalSGDState):
    """The step at which global averaging stops, and the groups; a subclass of torch's ``PostLocalSGDState``.

    ``process_group=None`` is the world. ``subgroup=None`` is the ranks on the same machine, found by host
    name at the first step that needs them. The state pickles without its groups, and loads with
    ``torch.load``'s defaults.
    """

    __slots__ = ()

    def __getstate__(self) -> dict[str, Any]:
        if any(getattr(self, group) is not None for group in _GROUPS):
            log.warning("process groups do not pickle: a PostLocalSGDState is saved without its own")
        return {name: getattr(self, name) for name in super().__slots__ if name not in _GROUPS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        log.warning(
            "a restored PostLocalSGDState averages over the world, then within each machine; set its "
            "process_group and subgroup if they were others"
        )
        for name, value in {**dict.fromkeys(_GROUPS), **state}.items():
            setattr(self, name, value)


torch.serialization.add_safe_globals([PostLocalSGDState])


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:  # noqa: N802
    """Average over ``state.process_group`` in the first ``start_localSGD_iter`` steps, then in the subgroup.

    With ``post_local_gradient_allreduce=False`` gradients stay as they are from then on. Average parameters
    after the optimizer's step too, or ranks drift apart.
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return run_recipe(fp32(), state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    if state.subgroup is None:
        group = group_or_world(state.process_group)
        state.subgroup = _group_of_this_machine(group, bucket.buffer().device)
    return run_recipe(fp32(), state.subgroup, bucket)


def _group_of_this_machine(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the group of the ranks with the same host name; collective over ``group``."""
    timeout = timeout_of(group)
    store, rendezvous = limited_store(group, timeout), next_rendezvous(group, timeout)
    store.set(f"{rendezvous}/machine/{group.rank()}", socket.gethostname())
    machines = [store.get(f"{rendezvous}/machine/{rank}") for rank in range(group.size())]
    world_ranks = dist.get_process_group_ranks(group)
    mine = machines[group.rank()]
    # Only members call this, since the model's group need not be the world.
    subgroup: dist.ProcessGroup = dist.new_group(
        [rank for rank, machine in zip(world_ranks, machines, strict=True) if machine == mine],
        backend=backend_name(group, device),
        use_local_synchronization=True,
    )
    return subgroup
