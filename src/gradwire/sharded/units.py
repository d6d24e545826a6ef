"""Units of a model that ``fully_shard`` has sharded: each reduces several gradients together."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.buckets import Slot, canonical_name, row_by_row
from gradwire.torch_private import fsdp


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a unit."""

    name: str
    fsdp_param: Any

    @property
    def parameter(self) -> nn.Parameter:
        """The shard that optimizers see, a ``DTensor``."""
        parameter: nn.Parameter = self.fsdp_param.sharded_param
        return parameter

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return fsdp.whole_shape(self.fsdp_param)

    @property
    def padded_shape(self) -> torch.Size:
        """The shape of a shard, the same on every rank: the last ranks' shards end with zeros."""
        shape: torch.Size = self.fsdp_param.padded_sharded_param_size
        return shape

    @property
    def shard_dim(self) -> int:
        """The dimension in which it is cut."""
        return fsdp.shard_dim(self.fsdp_param)

    @property
    def has_hooks(self) -> bool:
        """True if hooks run when its gradient is accumulated."""
        return fsdp.has_accumulation_hooks(self.parameter)

    def slot(self, num_shards: int = 1) -> Slot:
        """Return the slot of one shard, or of ``num_shards`` one after the other."""
        shape = torch.Size([num_shards * self.padded_shape[0], *self.padded_shape[1:]])
        return Slot(self.name, 0, shape, row_by_row(shape), self.shape)


@dataclass(frozen=True)
class UnnamedValues:
    """Values of some parameters of a unit, where it does not matter which."""

    name: str
    numel: int
    """The number of values in a shard."""

    def slot(self, num_shards: int = 1) -> Slot:
        return Slot(self.name, 0, torch.Size([num_shards * self.numel]), (1,))


class Unit:
    """The parameters of one ``fully_shard`` call, in the order in which torch reduces their gradients.

    Holds torch's objects weakly: a model holds its units through the communication that they replace.
    """

    def __init__(self, name: str, module: nn.Module, group: Any, module_names: dict[int, str]) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self._group = weakref.ref(group)
        self.names = tuple(_name(each, module_names) for each in group.fsdp_params)

    @property
    def module(self) -> Any:
        return require_alive(self._module())

    @property
    def group(self) -> Any:
        """The ``FSDPParamGroup`` of torch."""
        return require_alive(self._group())

    @property
    def parameters(self) -> list[ShardedParameter]:
        """All parameters, in torch's order."""
        pairs = zip(self.names, self.group.fsdp_params, strict=True)
        return [ShardedParameter(name, fsdp_param) for name, fsdp_param in pairs]

    @property
    def trained(self) -> list[ShardedParameter]:
        """The parameters that require gradients now."""
        return [each for each in self.parameters if each.parameter.requires_grad]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards."""
        return fsdp.shard_group_of(self.group)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard, if torch averages over them itself (HSDP)."""
        return fsdp.replicate_group_of(self.group)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.group.device
        return device

    @property
    def offloads(self) -> bool:
        """True if shards live on CPU while gradients are on another device."""
        is_offloaded = any(each.fsdp_param.offload_to_cpu for each in self.parameters)
        return is_offloaded and self.device.type != "cpu"

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which torch reduces gradients."""
        return fsdp.reduce_dtype(self.trained[0].fsdp_param)

    @property
    def reduce_scatter(self) -> Any:
        """The object that reduces and scatters gradients."""
        return fsdp.reduce_scatter_of(self.group)

    @property
    def all_gather(self) -> Any:
        """The object that gathers parameters."""
        return fsdp.all_gather_of(self.group)

    @property
    def num_gathers(self) -> int:
        """The number of times that parameters are gathered in a step."""
        return 2 if fsdp.gathers_twice(self.group) else 1

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype in which parameters are gathered."""
        return fsdp.gather_dtype(self.parameters[0].fsdp_param)

    @property
    def all_reduce_hook(self) -> Any:
        """The hook that takes gradients after they are scattered; None if there is none."""
        return fsdp.all_reduce_hook_of(self.group)

    @property
    def all_reduces(self) -> bool:
        """False while ``set_requires_all_reduce(False)`` lets gradients accumulate."""
        return bool(self.group.all_reduce_grads)

    @property
    def divides_by_factor(self) -> bool:
        """True if ``set_gradient_divide_factor`` has set a divisor: gradients are then summed over ranks."""
        return self.group.gradient_divide_factor is not None

    def divisor_of_sums(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return what torch divides sums in ``dtype`` over ranks by, after they are scattered."""
        return fsdp.divisor_of_sums(self.group, dtype, num_ranks)

    def may_write_later(self, dtype: torch.dtype) -> bool:
        """Return True if the gradients of this pass will be views of what is reduced, in ``dtype``.

        Then nothing reads the values before the backward pass ends.
        """
        is_plain = self.all_reduce_hook is None and dtype == fsdp.gradient_dtype(self.group)
        return is_plain and all(
            each.parameter.grad is None and not each.has_hooks and not each.fsdp_param.offload_to_cpu
            for each in self.parameters
        )


def find_units(model: nn.Module) -> list[Unit]:
    """Return the units of a model, one for each ``fully_shard`` call; ValueError if one cannot be taken."""
    module_names = {id(module): name for name, module in model.named_modules()}
    units: dict[int, Unit] = {}
    for name, module in model.named_modules():
        if not _is_unit(module):
            continue
        groups = fsdp.param_groups(module)
        if len(groups) > 1:
            raise ValueError(
                f"module {name!r} was sharded over several meshes by one fully_shard call, and torch then "
                "takes no communication but its own; shard its parts by calls of their own"
            )
        for group in groups:
            units.setdefault(id(group), Unit(name, module, group, module_names))
    return list(units.values())


def is_sharded(model: object) -> bool:
    """Return True if ``fully_shard`` has sharded the model or a part of it."""
    if not isinstance(model, nn.Module):
        return False
    kinds = (type(module) for module in model.modules() if _is_unit(module))
    return any("ReplicateModule" not in {base.__name__ for base in kind.__mro__} for kind in kinds)


def _is_unit(module: nn.Module) -> bool:
    kind = fsdp.fsdp_module_kind()
    return kind is not None and isinstance(module, kind)


def _name(fsdp_param: Any, module_names: dict[int, str]) -> str:
    module, name = fsdp.owner_of(fsdp_param)
    prefix = module_names.get(id(module))
    if prefix is None:
        raise ValueError(
            f"a part of the model was sharded by one fully_shard call together with a "
            f"{type(module).__name__} outside of it; attach to the model that has both"
        )
    return canonical_name(f"{prefix}.{name}" if prefix else name)


def require_alive(found: Any) -> Any:
    """Return a part of the model that is held weakly; RuntimeError if it exists no more."""
    if found is None:
        raise RuntimeError(
            "the model of this wire exists no more; state_dict and stats still work. For all else, keep a "
            "reference to the model, or attach to the one that you train now"
        )
    return found
