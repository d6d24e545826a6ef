"""Sharded models of `fuzz_sharded.py`: sharded, attached to, and followed by a copy that trains alone."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from fuzz_sharded_cases import Block, Model, ShardedFuzz
from gradwire.buckets import canonical_name


@dataclass
class Trained:
    """A model that is trained, its wire, and a copy of it that is trained alone."""

    model: Any
    parameters: dict[str, Any]
    """What optimizers step: the shards."""
    wire: gradwire.Wire
    twin: nn.Module
    replicas: dist.ProcessGroup | None
    """The ranks whose gradients must be the same."""
    has_feedback: bool


def make_model(case: ShardedFuzz) -> Model:
    torch.manual_seed(case.number)
    return Model(case)


def shard(case: ShardedFuzz, model: Model, mesh: DeviceMesh) -> None:
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": case.reshards,
        "mp_policy": MixedPrecisionPolicy(case.param_dtype, case.reduce_dtype, cast_forward_inputs=False),
    }
    if case.offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if case.compiled:
            block.compile(backend="eager")
        if block.inner is not None:
            fully_shard(block.inner, **options)
        if case.recomputed:
            model.blocks[number] = checkpoint_wrapper(block)
        fully_shard(model.blocks[number], **options)
    fully_shard(model, **options)


def open_run(
    case: ShardedFuzz, grid: tuple[int, int], native: bool, weights: dict[str, Tensor] | None
) -> Trained:
    """Return the case's model on a grid of replicas and shards; one shard and no mesh is DDP."""
    model = make_model(case)
    if weights is not None:
        model.load_state_dict(weights)
    twin = copy.deepcopy(model)
    num_replicas, num_shards = grid
    if num_shards == 0:
        ddp = DistributedDataParallel(model, find_unused_parameters=case.unused != "none")
        return Trained(ddp, named(model), gradwire.attach(ddp, case.recipe), twin, dist.group.WORLD, True)
    if case.param_dtype is not None:
        twin.to(case.param_dtype)
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
    has_replicas = num_replicas > 1
    shard(case, model, mesh if has_replicas and native else mesh["shard"])
    parameters = named(model)  # before a gather puts whole ones in their place
    if case.divisor is not None:
        for module in units(model):
            module.set_gradient_divide_factor(case.divisor)
            # For torch's own reduce-scatter over Gloo; with one shard, torch would divide twice.
            module.set_force_sum_reduction_for_comms(num_shards > 1)
    if case.accumulates == "last":  # torch cannot accumulate what it has never gathered
        for module in units(model):
            module.unshard()
        reshard(model)
    recipe = case.recipe if has_replicas or not case.has_replicas else "fp32"  # shards keep no residuals
    named_replicas = mesh["replicate"] if has_replicas and not native else None
    wire = gradwire.attach(model, recipe, replicas=named_replicas, weights=case.weights)
    replicas = mesh["replicate"].get_group() if has_replicas else None
    return Trained(model, parameters, wire, twin, replicas, has_replicas)


def units(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    for unit in units(model):
        unit.reshard()


def whole(tensor: Any) -> Tensor:
    found: Any = tensor.detach()
    values: Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    return values.clone()  # the only shard is its own whole


def named(model: nn.Module) -> dict[str, Any]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {canonical_name(name): parameter for name, parameter in inner.named_parameters()}


def follow(run: Trained, case: ShardedFuzz) -> None:
    """Give the twin the parameters that the model computes with; they are the same on all ranks."""
    decodes = case.weights not in (None, "fp32") and not isinstance(run.model, DistributedDataParallel)
    if decodes:
        for unit in units(run.model):
            unit.unshard()
    used = named(run.model) if decodes else run.parameters
    found = {name: p.detach().clone() if decodes else whole(p) for name, p in used.items()}
    if decodes:
        reshard(run.model)
    with torch.no_grad():
        for name, parameter in named(run.twin).items():
            parameter.copy_(found[name])
    require_same({name: p.detach() for name, p in named(run.twin).items()}, None, "parameters")


def require_same(tensors: dict[str, Tensor], group: dist.ProcessGroup | None, what: str) -> None:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, tensors, group=group)
    for name, own in tensors.items():
        assert all(torch.equal(other[name], own) for other in everyone), (
            f"{what} differ between ranks: {name}"
        )
