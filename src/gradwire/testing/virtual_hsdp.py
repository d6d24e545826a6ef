"""Replicas of a sharded model (HSDP) that share one copy of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.averaging import Grid, checkpoint
from gradwire.buckets import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.peers import Group, Traffic
from gradwire.recipes import Recipe, require_averaging, require_fixed, resolve_for_module
from gradwire.recipes import recipe as parse_recipe
from gradwire.sharded import shard_layout, unit_parameters
from gradwire.testing.virtual_group import run_virtual_ranks


class VirtualHSDP:
    """The ranks of a grid of replicas and shards, in one process, with a recipe between replicas.

    A model that is sharded over a mesh of these sizes, each member of its lists and sequences by itself, ends
    with the same bits. With three or more shards, torch may add the gradients of a replica in another order.

    Args:
        model: a model of parameters on one device, neither wrapped nor sharded.
        recipe: as for `gradwire.attach`. All replicas are on one node, unless it has ``local_size=``.
        replicas: number of replicas.
        shards: number of shards of each; rank ``r * shards + s`` holds shard s in replica r.

    Raises ValueError for numbers below 1, and for a recipe that does not average or does not fit.

    >>> model = nn.Linear(4, 1)
    >>> ranks = VirtualHSDP(model, "int8", replicas=2, shards=4)
    >>> for rank in range(8):
    ...     with ranks.backward_of(rank):  # on this rank's part of the batch
    ...         model(torch.randn(2, 4)).mean().backward()
    >>> ranks.average()  # from here on, as in any training loop: clip, step
    >>> model.weight.grad.shape
    torch.Size([1, 4])
    """

    def __init__(self, model: nn.Module, recipe: str | Recipe, replicas: int, shards: int) -> None:
        if replicas < 1 or shards < 1:
            raise ValueError(f"there must be at least 1 replica of 1 shard, not {replicas} of {shards}")
        self._grid = Grid(replicas * shards, shards)
        # Backward passes begin with the last block, and end with the parameters of the root.
        units = [
            {name: p for name, p in unit.items() if p.requires_grad}
            for unit in reversed(unit_parameters(model))
        ]
        self._units = [unit for unit in units if unit]
        self._parameters = {name: p for unit in self._units for name, p in unit.items()}
        if not self._parameters:
            raise ValueError("the model has no parameter that requires a gradient: nothing to average")
        chosen = parse_recipe(recipe)
        require_fixed(chosen, "VirtualHSDP")
        self.recipe = resolve_for_module(chosen, model, self._parameters, replicas)
        require_averaging(self.recipe, "virtual ranks, which share one model, do not work with it")
        self._layouts = [
            shard_layout(
                number,
                {name: p.shape for name, p in unit.items()},
                shards,
                dtype=next(iter(unit.values())).dtype,
            )
            for number, unit in enumerate(self._units)
        ]
        self.memories = [Memory() for _ in range(self._grid.world_size)]
        """The recipe's states by rank."""
        self.traffic = [Traffic() for _ in range(self._grid.world_size)]
        """The bytes and messages that each rank has sent to other replicas."""
        self.num_steps = 0
        self._scratches = [Scratch() for _ in range(replicas)]
        self._sums: dict[int, dict[str, Tensor]] = {}
        self._ready: set[int] = set()

    @property
    def world_size(self) -> int:
        return self._grid.world_size

    @contextmanager
    def backward_of(self, rank: int) -> Iterator[None]:
        """Take the gradients of backward passes inside for those of ``rank``; ranks come in order."""
        if rank != len(self._ready):
            raise ValueError(f"rank {rank} comes after rank {len(self._ready)}: gradients are added in order")
        for parameter in self._parameters.values():
            parameter.grad = None
        yield
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                raise ValueError(f"parameter {name} has no gradient; freeze what is not used")
            gradients[name] = parameter.grad
        sums = self._sums.setdefault(rank // self._grid.num_shards, {})
        for name, gradient in gradients.items():
            sums[name] = gradient if name not in sums else sums[name].add_(gradient)
        self._ready.add(rank)

    @torch.no_grad()
    def average(self) -> None:
        """Average the ranks' gradients; each parameter's ``grad`` is then the mean.

        Raises ValueError if a rank has had no `backward_of` in this step, `RanksFailed` if averaging fails.
        """
        if len(self._ready) < self.world_size:
            raise ValueError(f"rank(s) from {len(self._ready)} on have no gradients in this step")
        num_shards = self._grid.num_shards
        for sums in self._sums.values():
            for name, total in sums.items():
                sums[name] = _padded(total.div_(num_shards), num_shards)
        for shard in range(num_shards):
            run_virtual_ranks(functools.partial(self._average, shard), self._grid.num_replicas)
        for name, parameter in self._parameters.items():
            parameter.grad = self._sums[0][name][: len(parameter)]
        self._sums.clear()
        self._ready.clear()
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks between steps; `Wire.load_state_dict` takes it too."""
        recipe, grid = str(self.recipe), self._grid
        return checkpoint.merge_state_dicts(
            checkpoint.write(recipe, self.num_steps, (), memory.state_dict(), rank, grid)
            for rank, memory in enumerate(self.memories)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` or from the merged states of real ranks, also of another grid."""
        device = next(iter(self._parameters.values())).device
        saved = [
            checkpoint.read(state, self._parameters, (), rank, self._grid, "mean")
            for rank in range(self.world_size)
        ]
        for memory, own in zip(self.memories, saved, strict=True):
            memory.load_state_dict(own.memory, device)
        self.num_steps = saved[0].step

    def _average(self, shard: int, group: Group) -> None:
        """Average one shard of all units over the replicas."""
        rank = group.rank * self._grid.num_shards + shard
        for layout in self._layouts:
            views = {
                slot.name: self._sums[group.rank][slot.name].chunk(self._grid.num_shards)[shard]
                for slot in layout.slots
            }
            flat = torch.cat([view.flatten() for view in views.values()])
            context = Context(
                group,
                self._scratches[group.rank],
                1 / group.size,
                layout,
                self.memories[rank],
                self.num_steps,
            )
            average(flat, self.recipe.exchange, context)
            for name, values in layout.views(flat).items():
                views[name].copy_(values)
        self.traffic[rank].bytes_sent += group.traffic.bytes_sent
        self.traffic[rank].num_messages += group.traffic.num_messages


def _padded(gradient: Tensor, num_shards: int) -> Tensor:
    """Return a gradient with zeros behind it, so that all shards have as many rows."""
    missing = -len(gradient) % num_shards
    return torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])]) if missing else gradient
