"""Optimizer steps inside a hook, with torch's names; `gradwire.overlap_optimizer` is the public form.

DDP inspects the annotations of a hook, so this module keeps them as objects.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as upstream
from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire.averaging import RecipeRunner, Runner
from gradwire.buckets import Layouts
from gradwire.ddp import Bridge, HookInfo, HookRunner, SteppingRunner, hook_name, register_hook_info
from gradwire.ddp_comm_hooks.default_hooks import Hook
from gradwire.lanes import open_lane, open_local_lane
from gradwire.peers import Group, next_rendezvous
from gradwire.recipes import fp32

__all__: list[str] = []


class _OptimizerHookState(upstream._OptimizerHookState):
    """A functional optimizer, one with ``step_param(parameter, gradient)``, and what it may step."""

    __slots__ = ()

    @classmethod
    def from_functional_optim(cls, functional_optim: Any, params: Any = None) -> "_OptimizerHookState":
        """The same as the constructor, under the name it once had."""
        return cls(functional_optim, params)


def _hook_then_optimizer(hook: Hook, optimizer_state: upstream._OptimizerHookState) -> Hook:
    """Run ``hook``, then step the bucket's parameters with what its future holds.

    When the hook fails, nothing is stepped, and ``backward()`` raises.
    """
    chosen = getattr(optimizer_state, "params_to_optimize", None)
    bridges: list[Bridge] = []

    def step(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], group: Group) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if chosen is None or parameter in chosen:
                optimizer_state.functional_optimizer.step_param(parameter, gradient)

    def hook_then_optimizer(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        if not bridges:
            inner = HookRunner(hook, state, None)
            group = getattr(state, "process_group", state)
            # A state that tells no group stands for the world, as upstream.
            rank = group.rank() if isinstance(group, dist.ProcessGroup) else dist.get_rank()
            bridges.append(_stepping_bridge(inner, bucket, rank, step))
        return bridges[0].run(bucket)

    register_hook_info(hook_then_optimizer, HookInfo(wraps=hook))
    hook_then_optimizer.__qualname__ = f"_hook_then_optimizer({hook_name(hook)})"
    return hook_then_optimizer


def _apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> Hook:
    """Average plainly, then step the optimizers that ``_apply_optimizer_in_backward`` gave the parameters.

    The hook's state is a weak reference to the ``DistributedDataParallel``. DDP registers torch's own
    hook for such models at their first forward pass; `gradwire.attach` takes ours instead, on CPU too.
    Gradients are None after ``backward()``, whatever ``gradient_is_bucket_view`` says.
    """
    bridges: list[Bridge] = []

    def step(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], group: Group) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if hasattr(parameter, "_in_backward_optimizers"):
                parameter.grad = gradient
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()

    def apply_optim_in_backward(
        hook_state: weakref.ReferenceType[DistributedDataParallel], bucket: GradBucket
    ) -> Future[torch.Tensor]:
        def drop_gradients() -> None:
            ddp = hook_state()
            for parameter in ddp.module.parameters() if ddp is not None else ():
                if hasattr(parameter, "_in_backward_optimizers"):
                    parameter.grad = None

        if not bridges:
            ddp = hook_state()
            assert ddp is not None, "a hook is called by its model's reducer alone"
            group = ddp.process_group
            lane = open_lane(group, bucket.buffer().device, next_rendezvous(group), late=True)
            inner = RecipeRunner(fp32(), lane, Layouts())
            bridges.append(_stepping_bridge(inner, bucket, group.rank(), step, drop_gradients))
        return bridges[0].run(bucket)

    register_hook_info(apply_optim_in_backward, HookInfo(prepare=_take_over))
    return apply_optim_in_backward


def _take_over(ddp: DistributedDataParallel) -> None:
    """Keep the optimizers from stepping before the averaging, and DDP from registering torch's hook."""
    for parameter in ddp.module.parameters():
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    ddp._lazy_init_ran = True


def _stepping_bridge(
    inner: Runner,
    bucket: GradBucket,
    rank: int,
    step: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Group], None],
    after_backward: Callable[[], None] | None = None,
) -> Bridge:
    lane = open_local_lane(bucket.buffer().device, f"step-{inner.name}")
    return Bridge(SteppingRunner(inner, lane, step, after_backward=after_backward), rank)
