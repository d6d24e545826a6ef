"""The average of a unit's shards over replicas, in place of the all-reduce of torch's HSDP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.sharded.backward import Backward
from gradwire.sharded.units import ShardedParameter, Unit


class UnitReplicas:
    """The hooks of one unit: they start an average when torch has accumulated the unit's shards.

    torch calls its all-reduce hook between the reduce-scatter and the accumulation of gradients, where an
    average would have to be over before the hook returns, and would be taken anew of each micro-batch. So
    that hook only notes how many values come. A hook on each parameter, which torch calls after the
    accumulation, notes which have come; the last one starts the average of what has been accumulated.

    Parameters may be unfrozen, or replaced when a checkpoint is loaded. A hook goes on those that are new
    right before torch accumulates their gradients.
    """

    def __init__(self, unit: Unit, backward: Backward, num_replicas: int) -> None:
        """Put the hooks in place; `remove` takes them away."""
        self._unit = unit
        self._backward = backward
        self._num_replicas = num_replicas
        self._num_missing = 0
        self._accumulated: list[ShardedParameter] = []
        self._hooked: dict[str, tuple[Tensor, Any]] = {}
        """Parameters that have a hook, by name, and what takes it away."""
        unit.module.set_all_reduce_hook(self._expect)
        self._hook_new_parameters()

    def remove(self) -> None:
        """Take the hooks away."""
        self._unit.module.set_all_reduce_hook(None)
        for _, handle in self._hooked.values():
            handle.remove()

    def require_complete(self) -> None:
        """Raise RuntimeError if parameters have been reduced in this pass that have no hook."""
        if self._num_missing:
            self._num_missing = 0
            raise RuntimeError(
                f"unit {self._unit.name!r} has reduced gradients of parameters that gradwire does not know; "
                "attach again after changing a model's parameters"
            )

    def _hook_new_parameters(self) -> None:
        for each in self._unit.trained:
            parameter = each.parameter
            before, handle = self._hooked.get(each.name, (None, None))
            if before is not parameter:
                if handle is not None:
                    handle.remove()
                hook = functools.partial(self._note, each)
                self._hooked[each.name] = parameter, parameter.register_post_accumulate_grad_hook(hook)

    def _expect(self, reduced: Tensor) -> None:
        """Note the number of values of this pass; called by torch before it accumulates them."""
        if self._unit.divides_by_factor:
            # torch's own HSDP then sums over replicas. What is accumulated may hold sums of micro-batches
            # before, the same on all replicas, which only a mean leaves as they are.
            reduced.mul_(self._num_replicas)
        if reduced.is_cuda:
            # torch may free this on another stream than the one that will read it.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        self._hook_new_parameters()
        self._num_missing = reduced.numel()
        self._accumulated.clear()
        self._backward.expect(self)

    def _note(self, parameter: ShardedParameter, _: Tensor) -> None:
        """Note that a parameter's gradient is accumulated, and start the average with the last one."""
        self._accumulated.append(parameter)
        self._num_missing -= parameter.padded_shape.numel()
        if self._num_missing == 0 and self._unit.all_reduces:
            with torch.no_grad():
                self._start(list(self._accumulated))

    def _start(self, parameters: list[ShardedParameter]) -> None:
        shards = [_local(each) for each in parameters]
        sizes = [each.padded_shape.numel() for each in parameters]
        flat = _shared_memory(shards, sizes)
        is_copy = flat is None
        if flat is None:
            flat = _packed(shards, sizes)
        self._backward.start(
            flat,
            parameters,
            functools.partial(_unpack, flat, shards, sizes) if is_copy else _leave,
            may_be_late=True,
        )


def _local(parameter: ShardedParameter) -> Tensor:
    gradient: Any = parameter.parameter.grad
    local: Tensor = gradient.to_local()
    return local


def _shared_memory(shards: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """Return the memory of shards that lie one after the other, as torch makes them; None if they do not."""
    first, total = shards[0], sum(sizes)
    end = first.storage_offset()
    for shard, size in zip(shards, sizes, strict=True):
        is_next = shard.storage_offset() == end and shard.numel() == size and shard.is_contiguous()
        if not is_next or shard.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += size
    return first.as_strided((total,), (1,), first.storage_offset())


def _packed(shards: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return copies of the shards one after the other, each with zeros behind it up to its size."""
    flat = shards[0].new_zeros(sum(sizes))
    for part, shard in zip(flat.split(list(sizes)), shards, strict=True):
        part[: shard.numel()].view_as(shard).copy_(shard)
    return flat


def _unpack(flat: Tensor, shards: Sequence[Tensor], sizes: Sequence[int]) -> None:
    for part, shard in zip(flat.split(list(sizes)), shards, strict=True):
        shard.copy_(part[: shard.numel()].view_as(shard))


def _leave() -> None:
    """Leave a result where it is."""
