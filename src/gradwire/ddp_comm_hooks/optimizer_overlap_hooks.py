"""Optimizer steps inside a hook, under torch's names; new code should use `gradwire.overlap_optimizer`.

DDP inspects the annotations of a hook, so this module keeps them as objects.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as upstream
from torch.nn.parallel import DistributedDataParallel

from gradwire.buckets import Layouts
from gradwire.ddp import (
    Bridge,
    HookInfo,
    HookRunner,
    Runner,
    SteppingRunner,
    hook_name,
    hook_with_bridge,
    open_raw_engine,
)
from gradwire.ddp_comm_hooks.default_hooks import Hook
from gradwire.lanes import open_local_lane
from gradwire.peers import Group, own_world_rank
from gradwire.recipes import fp32
from gradwire.torch_private import GradBucket, backward_step_handles, in_backward_optimizers, skip_lazy_init

__all__: list[str] = []


class _OptimizerHookState(upstream._OptimizerHookState):
    """A functional optimizer, with ``step_param(parameter, gradient)``, and the parameters it may step."""

    __slots__ = ()

    @classmethod
    def from_functional_optim(cls, functional_optim: Any, params: Any = None) -> "_OptimizerHookState":
        """Call the constructor; an older name that torch keeps."""
        return cls(functional_optim, params)


def _hook_then_optimizer(hook: Hook, optimizer_state: upstream._OptimizerHookState) -> Hook:
    """Run ``hook``, then step the bucket's parameters with what its future holds.

    If the hook fails, nothing is stepped and ``backward()`` raises.
    """
    chosen = getattr(optimizer_state, "params_to_optimize", None)

    def step(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], group: Group) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if chosen is None or parameter in chosen:
                optimizer_state.functional_optimizer.step_param(parameter, gradient)

    def open_bridge(state: Any, bucket: GradBucket) -> Bridge:
        group = getattr(state, "process_group", state)
        # A state without a group means the world, as in torch.
        rank = own_world_rank(group) if isinstance(group, dist.ProcessGroup) else dist.get_rank()
        return _stepping_bridge(HookRunner(hook, state), bucket, rank, step)

    return hook_with_bridge(open_bridge, f"_hook_then_optimizer({hook_name(hook)})", HookInfo(wraps=hook))


def _apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> Hook:
    """Average uncompressed, then step the optimizers that ``_apply_optimizer_in_backward`` has set up.

    The hook's state is a weak reference to the ``DistributedDataParallel``. DDP registers torch's own hook
    for such models at their first forward pass. With `gradwire.attach` ours is used instead, on CPU too.
    Gradients are None after ``backward()``, whatever ``gradient_is_bucket_view`` is.
    """

    def step(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], group: Group) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if (optimizers := in_backward_optimizers(parameter)) is not None:
                parameter.grad = gradient
                for optimizer in optimizers:
                    optimizer.step()

    def open_bridge(state: weakref.ReferenceType[DistributedDataParallel], bucket: GradBucket) -> Bridge:
        def drop_gradients() -> None:
            ddp = state()
            for parameter in ddp.module.parameters() if ddp is not None else ():
                if in_backward_optimizers(parameter) is not None:
                    parameter.grad = None

        ddp = state()
        assert ddp is not None, "only the model's reducer calls its hook"
        group = ddp.process_group
        inner = open_raw_engine(fp32(), group, bucket)
        return _stepping_bridge(inner, bucket, own_world_rank(group), step, drop_gradients)

    return hook_with_bridge(open_bridge, "_apply_optim_in_backward", HookInfo(prepare=_stop_backward_steps))


def _stop_backward_steps(ddp: DistributedDataParallel) -> None:
    """Stop the optimizers from stepping before the averaging, and DDP from registering torch's hook."""
    for parameter in ddp.module.parameters():
        for handle in backward_step_handles(parameter):
            handle.remove()
    skip_lazy_init(ddp)


def _stepping_bridge(
    inner: Runner,
    bucket: GradBucket,
    rank: int,
    step: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Group], None],
    after_backward: Callable[[], None] | None = None,
) -> Bridge:
    lane = open_local_lane(bucket.buffer().device, f"step-{inner.name}")
    return Bridge(SteppingRunner(inner, lane, step, after_backward=after_backward), Layouts(), rank)
