"""Checks of what does not work with a sharded model, before anything is attached."""

from __future__ import annotations

from gradwire.ddp import Options
from gradwire.peers import uses_nccl
from gradwire.recipes import Recipe
from gradwire.sharded.model import ShardedModel
from gradwire.sharded.reduce_scatter import UnitReduceScatter
from gradwire.sharded.replicas import UnitReplicas
from gradwire.sharded.units import Unit
from gradwire.torch_private import fsdp


def check(sharded: ShardedModel, options: Options, chosen: Recipe, *, has_weights: bool = False) -> None:
    """Raise ValueError for what does not work with this model.

    ``has_weights`` if parameters are gathered by an encoding.
    """
    options.check(chosen, sharded.device, is_nccl=uses_nccl(sharded.group, sharded.device))
    for unit in sharded.units:
        _check_unit(unit, has_replicas=sharded.has_replicas)
        if has_weights:
            _check_gather(unit)
    if sharded.has_replicas:
        return
    if options.verify_every:
        raise ValueError(
            "verify_every= compares gradients that are equal on all ranks, and each rank has its own shard: "
            "leave it out, or average over replicas (HSDP)"
        )
    if options.every is not None:
        raise ValueError(
            "telemetry of errors needs whole gradients, and each rank has its own shard: pass "
            "Telemetry(errors=False), or average over replicas (HSDP)"
        )


def _check_unit(unit: Unit, *, has_replicas: bool) -> None:
    where = f"module {unit.name!r}" if unit.name else "the model"
    needed = "set_all_reduce_hook" if has_replicas else "set_custom_reduce_scatter"
    if not hasattr(unit.module, needed):
        raise ValueError(f"this version of torch has no FSDPModule.{needed}; update torch, or use DDP")
    comm = type(unit.reduce_scatter)
    if is_attached(unit):
        raise ValueError(f"gradwire is attached to {where} already; call detach() on its wire first")
    if comm.__name__ != "DefaultReduceScatter" and not has_replicas:
        raise ValueError(
            f"{where} has a reduce-scatter of its own, {comm.__name__}; leave set_custom_reduce_scatter, "
            "set_symm_mem_for_comm and set_allocate_memory_from_process_group_for_comm out"
        )
    if unit.all_reduce_hook is not None:
        raise ValueError(f"{where} has an all-reduce hook already; leave set_all_reduce_hook out")
    if any(p.parameter.is_meta for p in unit.parameters):
        raise ValueError(f"{where} has parameters on the meta device; materialize them before you attach")
    if not has_replicas:
        return
    if unit.offloads:
        raise ValueError(
            f"{where} is offloaded to CPU, where gradients arrive too late to be averaged over replicas; "
            "leave CPUOffloadPolicy out"
        )
    if any(p.has_hooks for p in unit.parameters):
        raise ValueError(
            f"{where} has parameters with hooks that take gradients before they are averaged over replicas; "
            "leave register_post_accumulate_grad_hook out, and step after backward()"
        )


def _check_gather(unit: Unit) -> None:
    if not hasattr(unit.module, "set_custom_all_gather"):
        raise ValueError(
            "this version of torch has no FSDPModule.set_custom_all_gather, which weights= needs; update "
            "torch, or leave it out"
        )
    if len({fsdp.gather_dtype(each.fsdp_param) for each in unit.parameters}) > 1:
        raise ValueError(
            f"module {unit.name!r} gathers parameters of several dtypes as bytes, which weights= cannot "
            "encode; leave it out, or give MixedPrecisionPolicy a param_dtype"
        )
    comm = type(unit.all_gather).__name__
    if comm != "DefaultAllGather":
        raise ValueError(
            f"module {unit.name!r} has an all-gather of its own, {comm}; leave set_custom_all_gather, "
            "set_symm_mem_for_comm and set_allocate_memory_from_process_group_for_comm out, or weights="
        )


def is_attached(unit: Unit) -> bool:
    """Return True if a wire averages this unit's gradients."""
    hook_owner = getattr(unit.all_reduce_hook, "__self__", None)
    return isinstance(unit.reduce_scatter, UnitReduceScatter) or isinstance(hook_owner, UnitReplicas)
