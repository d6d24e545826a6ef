"""Private names of DistributedDataParallel. Its type is Any here: only package `ddp` knows the class."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

AnyFuture = torch._C.Future
FIRST_BUCKET_BYTES = _distributed_c10d._DEFAULT_FIRST_BUCKET_BYTES
compute_bucket_assignment = _distributed_c10d._compute_bucket_assignment_by_size

_C10D = "torch._C._distributed_c10d"
# Rows of `PRIVATE_NAMES`.
DDP_NAMES = (
    (f"{_C10D}:GradBucket", "the bucket that DDP passes to a hook", "torch.distributed.GradBucket"),
    ("torch._C:Future", "what every hook returns", "torch.futures.Future"),
    (f"{_C10D}:_compute_bucket_assignment_by_size", "DDP's buckets of a model", "write it again"),
    (f"{_C10D}:_DEFAULT_FIRST_BUCKET_BYTES", "the size of DDP's first bucket", "1 MiB"),
    ("ddp:_comm_hooks", "finds and frees hooks of the user's", "let DDP refuse a second hook"),
    ("ddp:_get_ddp_logging_data", "finds a hook of DDP's own", "let DDP refuse a second hook"),
    ("ddp:_join_config", "knows whether join() is active", "divide by all ranks"),
    ("ddp:_divide_by_initial_world_size", "knows what join() divides by", "divide by all ranks"),
    ("ddp:_use_python_reducer", "refuses DDP's Python reducer", "no such check"),
    ("ddp:_lazy_init_ran", "keeps torch's in-backward hook away", "refuse such models"),
    (
        "torch.distributed.optim.apply_optimizer_in_backward:param_to_optim_hook_handle_map",
        "stops steps before the averaging",
        "refuse such models",
    ),
    ("stepped:_in_backward_optimizers", "finds optimizers that step in backward()", "no such check"),
    (
        f"{_C10D}:Reducer._run_allreduce_hook",
        "what the hook of mixed_precision= calls to average",
        "refuse mixed_precision=",
    ),
    (
        "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks:_OptimizerHookState",
        "the base class of ours in ddp_comm_hooks",
        "a class without a base",
    ),
)


def registered_hooks(ddp: Any) -> list[tuple[Callable[..., Any], Any]]:
    """Return DDP's own list of hooks with their states; what is removed from it is not pickled."""
    found: list[tuple[Callable[..., Any], Any]] = ddp._comm_hooks
    return found


def ddp_facts(ddp: Any) -> dict[str, Any]:
    """Return the facts that DDP keeps for its logs: its own hook, numbers and sizes of buckets."""
    found: dict[str, Any] = ddp._get_ddp_logging_data()
    return found


def is_joining(ddp: Any) -> bool:
    """Return True inside ``with ddp.join()``."""
    return bool(ddp._join_config.enable)


def divides_by_active_ranks(ddp: Any) -> bool:
    """Return True if ``join()`` divides by the number of ranks that still have input."""
    return is_joining(ddp) and not ddp._divide_by_initial_world_size


def uses_python_reducer(ddp: Any) -> bool:
    """Return True if DDP's buckets are made by torch.compile, which passes them to no hook."""
    return bool(ddp._use_python_reducer)


def skip_lazy_init(ddp: Any) -> None:
    """Keep DDP from registering a hook of its own at its first forward pass."""
    ddp._lazy_init_ran = True


def replace_reducer(ddp: Any, average: Callable[[GradBucket], Future[Tensor]]) -> None:
    """Let the hook that ``mixed_precision=`` registers average by ``average``, in place.

    The hook reaches DDP through a weak reference in its state, and gets a stand-in instead. The stand-in's
    reducer calls ``average``, in a group of one rank.
    """
    model_ref = weakref.ref(ddp)

    def stand_in() -> SimpleNamespace:
        model = model_ref()
        assert model is not None, "only the model's reducer calls its hook"
        return SimpleNamespace(
            reducer=SimpleNamespace(_run_allreduce_hook=average),
            # DDP divides by this size; our average is divided already.
            process_group=SimpleNamespace(size=lambda: 1),
            mixed_precision=model.mixed_precision,
            module=model.module,
        )

    state: Any = registered_hooks(ddp)[0][1]
    state.ddp_weakref = stand_in


def backward_step_handles(parameter: Tensor) -> Sequence[Any]:
    """Return the handles of the hooks by which ``_apply_optimizer_in_backward`` steps ``parameter``."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    found: Sequence[Any] = param_to_optim_hook_handle_map.get(parameter, [])
    return found


def in_backward_optimizers(parameter: Tensor) -> Sequence[Any] | None:
    """Return the optimizers that step ``parameter`` in the backward pass, or None if none do."""
    found: Sequence[Any] | None = getattr(parameter, "_in_backward_optimizers", None)
    return found
