"""Private names of torch, all that gradwire uses.

`PRIVATE_NAMES` lists them, each with its purpose and its replacement if torch drops it. The rest of gradwire
calls the functions of this package, so another version of torch changes it alone.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import ProcessGroupGloo as ProcessGroupGloo
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.futures import Future
from torch.utils._pytree import tree_map_only as tree_map_only

from gradwire.torch_private.fsdp import FSDP_NAMES
from gradwire.torch_private.zero import zero_constructor as zero_constructor
from gradwire.torch_private.zero import zero_device as zero_device
from gradwire.torch_private.zero import zero_overlaps as zero_overlaps
from gradwire.torch_private.zero import zero_parameters as zero_parameters
from gradwire.torch_private.zero import zero_share as zero_share
from gradwire.torch_private.zero import zero_sync as zero_sync

AnyFuture = torch._C.Future
FIRST_BUCKET_BYTES = _distributed_c10d._DEFAULT_FIRST_BUCKET_BYTES
compute_bucket_assignment = _distributed_c10d._compute_bucket_assignment_by_size


@dataclass(frozen=True)
class PrivateName:
    """A name of torch that torch may rename or drop."""

    path: str
    """``module:name``, or ``kind:name`` for an attribute of an object; see `missing_names`."""
    purpose: str
    instead: str
    """The replacement if the name is gone."""


_C10D = "torch._C._distributed_c10d"
PRIVATE_NAMES = tuple(
    PrivateName(*row)
    for row in (
        # Names that torch.distributed has too, but not for type checkers.
        (f"{_C10D}:GradBucket", "the bucket that DDP passes to a hook", "torch.distributed.GradBucket"),
        (f"{_C10D}:Store", "where ranks meet", "torch.distributed.Store"),
        (f"{_C10D}:HashStore", "where a group of one rank meets", "torch.distributed.HashStore"),
        (f"{_C10D}:PrefixStore", "where ranks meet", "torch.distributed.PrefixStore"),
        (f"{_C10D}:TCPStore", "where ranks meet", "torch.distributed.TCPStore"),
        (f"{_C10D}:ProcessGroupGloo", "groups that torch's registry does not know", "dist.new_group"),
        ("torch._C:Future", "what every hook returns", "torch.futures.Future"),
        # Autograd and tensors.
        ("torch._C:_current_graph_task_id", "tells a backward pass from join()", "a flag of our own hooks"),
        ("torch._C:_current_autograd_node", "tells a pass from the callbacks after it", "count all buckets"),
        ("torch._C._autograd:_profiler_enabled", "records ranges only if read", "record them always"),
        (
            "torch.profiler:record_function._call_end_callbacks_on_future",
            "ends a range with the future",
            "end it when the hook returns",
        ),
        (
            "torch.autograd:Variable._execution_engine.queue_callback",
            "raises errors from backward()",
            "raise them in the next forward pass",
        ),
        ("torch:Tensor._version", "finds gradients changed after backward()", "no such check"),
        ("torch:_foreach_copy_", "copies many tensors in one call", "a loop of copy_"),
        ("torch:_foreach_norm", "largest magnitudes in one call", "a loop of abs().max()"),
        ("scaler:_scale", "residuals follow the loss scale", "GradScaler.get_scale, where the host waits"),
        ("torch.utils._pytree:tree_map_only", "moves a batch to a device", "torch.utils.pytree"),
        # Process groups.
        ("group:_get_backend", "the backend for a device", "dist.get_backend_config"),
        ("group:_device_types", "the devices that a group serves", "dist.get_backend_config"),
        *(
            (f"group:{name}", "a group over any store", "refuse gradwire.make_group")
            for name in ("_register_backend", "_set_default_backend")
        ),
        (
            f"{_C10D}:ProcessGroupGloo._set_sequence_number_for_group",
            "a group over any store",
            "refuse gradwire.make_group",
        ),
        ("options:_timeout", "the timeout of a group", "dist.default_pg_timeout"),
        (
            "torch.distributed.distributed_c10d:_get_process_group_store",
            "the store of a group in older versions",
            "ProcessGroup.get_group_store, which newer versions have",
        ),
        ("torch.distributed.distributed_c10d:_get_default_store", "the world's store", "store_of(WORLD)"),
        # DistributedDataParallel.
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
        (
            "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks:_OptimizerHookState",
            "the base class of ours in ddp_comm_hooks",
            "a class without a base",
        ),
        # ZeroRedundancyOptimizer.
        (
            "torch.distributed.optim.utils:functional_optim_map",
            "steps inside a hook",
            "refuse ZeRO steps in hooks",
        ),
        *(
            (f"zero:{name}", "steps inside a hook", "refuse ZeRO steps in hooks")
            for name in (
                "_overlap_with_ddp",
                "_default_device",
                "_all_params",
                "_optim_constructor",
                "_optim_defaults",
                "_overlap_info",
                "_clear_cache",
                "_partition_parameters_cache",
                "_partition_param_group",
                "_sync_param_groups",
            )
        ),
        (
            "torch.distributed.optim.zero_redundancy_optimizer:_OverlapStatus",
            "steps inside a hook",
            "refuse ZeRO steps in hooks",
        ),
        *FSDP_NAMES,
    )
)


def missing_names(**objects: Any) -> list[PrivateName]:
    """Return the private names that the installed torch lacks.

    Args:
        objects: a ``group``, its backend's ``options``, a ``ddp`` model, a ``zero`` optimizer, a ``scaler``,
            a ``param_group`` and an ``fsdp_param`` of a sharded model, to look for the names that objects
            have. Names of objects that are not given are left out.
    """

    def lacks(private: PrivateName) -> bool:
        owner, _, names = private.path.partition(":")
        if owner.islower() and "." not in owner and owner != "torch":
            if owner not in objects:
                return False
            found = objects[owner]
        else:
            try:
                found = importlib.import_module(owner)
            except ImportError:
                return True
        for name in names.split("."):
            if not hasattr(found, name):
                return True
            found = getattr(found, name)
        return False

    return [private for private in PRIVATE_NAMES if lacks(private)]


# Autograd and tensors.


def backward_pass() -> int:
    """Return the number of the backward pass that this thread is in; -1 outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


def is_in_node() -> bool:
    """Return True if a node of the autograd graph calls this, and not a callback after the backward pass."""
    return torch._C._current_autograd_node() is not None


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward pass under way; an error that it raises leaves it."""
    Variable._execution_engine.queue_callback(callback)


def profiler_is_on() -> bool:
    """Return True while a profiler records."""
    return bool(torch._C._autograd._profiler_enabled())


def end_range_with(recorded: torch.profiler.record_function, future: Future[Tensor]) -> Future[Tensor]:
    """End a profiler's range when ``future`` completes; return a future that completes after that."""
    ended: Future[Tensor] = recorded._call_end_callbacks_on_future(future)
    return ended


def loss_scale_of(scaler: GradScaler) -> Tensor | None:
    """Return the scale of the loss, on its device; None before a loss has been scaled."""
    return scaler._scale


def num_writes(tensor: Tensor) -> int:
    """Return a number that grows with each write to ``tensor``."""
    return tensor._version


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(list(targets), list(sources))


def largest_magnitudes(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return each tensor's largest magnitude; NaN if it holds one."""
    return tuple(torch._foreach_norm(list(tensors), ord=float("inf")))


# Process groups and stores.


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store in which the ranks of ``group`` meet."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def default_store() -> Any:
    """Return the store of the world."""
    return dist.distributed_c10d._get_default_store()


def has_tcp_store(store: Any) -> bool:
    """Return True if ``store`` is a TCPStore, whatever prefixes are around it."""
    return isinstance(_without_prefixes(store), TCPStore)


def _without_prefixes(store: Any) -> Any:
    return getattr(store, "_underlying_non_prefix_store", store)  # only a PrefixStore has one


def own_connection(store: Any, group_name: str) -> Any:
    """Return a group's ``store`` with a connection of its own, if it has connections.

    torch 2.6 cannot clone a store, 2.8 can. Without that, the keys of this one are apart from the group's.
    """
    if hasattr(store, "clone"):
        return store.clone()
    if not has_tcp_store(store):
        return store
    server = _without_prefixes(store)
    connected = TCPStore(server.host, server.port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"gradwire/{group_name}", connected)


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a Gloo group over ``store``, which torch's registry does not know; collective."""
    if not hasattr(dist.ProcessGroup, "_set_default_backend"):  # before torch 2.6
        raise RuntimeError(
            f"torch {torch.__version__} cannot make a process group over a store: update torch, or use "
            "torch.distributed.new_group"
        )
    backend = ProcessGroupGloo(store, rank, size, timeout)
    backend._set_sequence_number_for_group()
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    return group


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the devices whose tensors ``group`` can exchange."""
    return list(group._device_types)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that serves tensors on ``device``."""
    return group._get_backend(device)


def timeout_of_backend(backend: Any) -> timedelta | None:
    """Return the timeout of a backend's collectives, or None if it has none."""
    found = getattr(backend.options, "_timeout", None)
    return None if found is None else timedelta(seconds=found.total_seconds())


# DistributedDataParallel. Types are Any: only `ddp` knows the class.


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


def optimizer_class(functional: Any) -> Any:
    """Return the optimizer whose functional form is ``functional``, or None."""
    from torch.distributed.optim.utils import functional_optim_map

    return {made: kind for kind, made in functional_optim_map.items()}.get(functional)


def in_backward_optimizers(parameter: Tensor) -> Sequence[Any] | None:
    """Return the optimizers that step ``parameter`` in the backward pass, or None if none do."""
    found: Sequence[Any] | None = getattr(parameter, "_in_backward_optimizers", None)
    return found


def uncompiled(model: Any) -> Any:
    """Return the model inside ``torch.compile(model)``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)
