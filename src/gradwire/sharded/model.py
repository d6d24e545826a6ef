"""Facts about a sharded model: its units, its ranks, and what must be equal on all of them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.buckets import BucketLayout, canonical_name
from gradwire.exchanges import Route
from gradwire.peers import is_in_world, own_world_rank
from gradwire.recipes import Recipe, fingerprint, require_nodes, route_module_tables, scattered
from gradwire.sharded.units import ShardedParameter, find_units, require_alive


class ShardedModel:
    """A model that ``fully_shard`` has sharded, and the replicas to average it over, if there are any."""

    def __init__(self, root: nn.Module, replicas: object = None) -> None:
        """Find the model's units; raise TypeError or ValueError if it cannot be averaged."""
        self._root = weakref.ref(root)
        self.units = [unit for unit in find_units(root) if unit.parameters]
        if not self.units or not self.trained():
            raise ValueError(
                "no sharded parameter of this model requires a gradient: there is nothing to average; "
                "unfreeze a parameter before you attach"
            )
        self.device: torch.device = _one("devices", [unit.device for unit in self.units])
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"gradwire averages gradients on cpu and cuda, not on {self.device.type}")
        shards = _same_ranks("groups of shards", [unit.shard_group for unit in self.units])
        native = _same_ranks("groups of replicas", [unit.replicate_group for unit in self.units])
        assert shards is not None
        self.is_native_hsdp = native is not None
        given = group_of(replicas, "replicas")
        if given is not None and native is not None and given is not native:
            raise ValueError(
                "the model was sharded over a mesh with replicas, and replicas= is another group: leave it "
                "out"
            )
        over = given if native is None else native
        # Held weakly by the wire; torch keeps groups until they are destroyed.
        self._shards, self._replicas = weakref.ref(shards), None if over is None else weakref.ref(over)
        self.num_shards = shards.size()
        num_replicas = 1 if over is None else over.size()
        self.world_size = num_replicas * self.num_shards
        replica = 0 if over is None else over.rank()
        self.rank = replica * self.num_shards + shards.rank()

    @property
    def root(self) -> nn.Module:
        root: nn.Module = require_alive(self._root())
        return root

    @property
    def exists(self) -> bool:
        """True unless the model is gone, which this does not keep alive."""
        return self._root() is not None

    @property
    def has_replicas(self) -> bool:
        """True if gradients are averaged over replicas, and torch reduces shards."""
        return self._replicas is not None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that exchange by a recipe: the replicas, or the shards if there are none."""
        return self.shards if self._replicas is None else _alive(self._replicas)

    @property
    def recorded_rank(self) -> int:
        """The rank in events: that of the world, or of the model if its replicas are in no common world."""
        return own_world_rank(self.shards) if is_in_world(self.group) else self.rank

    @property
    def shards(self) -> dist.ProcessGroup:
        """The ranks that hold the model's shards."""
        return _alive(self._shards)

    def trained(self) -> list[ShardedParameter]:
        """Return the parameters that require gradients."""
        return [each for unit in self.units for each in unit.trained]

    def left_out(self) -> list[str]:
        """Return the names of trained parameters that no ``fully_shard`` call has sharded."""
        known = {name for unit in self.units for name in unit.names}
        every = self.root.named_parameters(remove_duplicate=False)  # a tied weight has several names
        sharded = {id(parameter) for name, parameter in every if canonical_name(name) in known}
        return [
            canonical_name(name)
            for name, parameter in self.root.named_parameters()
            if parameter.requires_grad and id(parameter) not in sharded
        ]

    def resolve(self, recipe: Recipe) -> Recipe:
        """Return ``recipe`` for this model; ValueError if it does not fit."""
        for each in recipe.leaves():
            if each.reduction == "sum":
                raise ValueError(
                    f"recipe {each} sums, and a sharded model decides that itself; leave reduction= out, and "
                    "see FSDPModule.set_gradient_divide_factor"
                )
        trained = self.trained()
        routed = route_module_tables(recipe, self.root, [each.name for each in trained])
        if self.has_replicas:
            require_nodes(routed, self.group.size())
        if isinstance(routed.exchange, Route):
            routed.exchange.check(each.slot() for each in trained)
        return routed if self.has_replicas else scattered(self._with_units_of_tables(routed))

    def _with_units_of_tables(self, recipe: Recipe) -> Recipe:
        """Name the units that have tables too: a unit of unknown parameters goes by its own name."""
        if recipe.tuning is None:
            return recipe
        tables = recipe.tuning.tables
        units = tuple(unit.name for unit in self.units if not set(tables).isdisjoint(unit.names))
        return replace(recipe, tuning=replace(recipe.tuning, tables=(*tables, *units)))

    def claim(self, chosen: dict[str, str]) -> dict[str, str]:
        """Return the facts that must be equal on all ranks: the ``chosen`` ones, and those of the model."""
        units = {f"unit {number}": ", ".join(unit.names) for number, unit in enumerate(self.units)}
        parameters = {
            f"parameter {number}": f"{each.name}, shape {tuple(each.shape)}, {each.parameter.dtype}"
            for number, each in enumerate(self.trained())
        }
        mode = "over replicas" if self.has_replicas else "over shards"
        return {**fingerprint.of_version(), **chosen, "averaged": mode, **units, **parameters}

    def shard_claim(self) -> dict[str, str]:
        """Return what must be equal on all replicas: the shard that they hold."""
        called = "the shard (replicas= takes the ranks that hold the same one, as mesh['replicate'] does)"
        return {called: f"{self.shards.rank()} of {self.num_shards}"}

    def replica_claim(self) -> dict[str, str]:
        """Return what must be equal on all shards: the replica that they are parts of."""
        called = "the place in replicas= (the shards of one replica have the same, as in mesh['replicate'])"
        return {called: f"{self.group.rank()} of {self.group.size()}"}

    def expected_layouts(self) -> tuple[BucketLayout, ...]:
        """Return a bucket for each unit, as a pass without unused parameters has them."""
        num_shards = 1 if self.has_replicas else self.num_shards
        units = [unit for unit in reversed(self.units) if unit.trained]
        return tuple(
            BucketLayout.packed(
                index, unit.reduce_dtype, [each.slot(num_shards) for each in unit.trained], num_shards
            )
            for index, unit in enumerate(units)
        )


class ShardedGradients:
    """The gradients of a sharded model, for the checks that follow a backward pass."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def trained(self) -> dict[str, nn.Parameter]:
        return {each.name: each.parameter for each in self._model.trained()}

    def shared(self) -> dict[str, nn.Parameter]:
        return {canonical_name(name): parameter for name, parameter in self._model.root.named_parameters()}

    def clear(self) -> None:
        for parameter in self._model.root.parameters():
            parameter.grad = None


def group_of(ranks: object, argument: str) -> dist.ProcessGroup | None:
    """Return a process group, or that of a mesh; an error names the argument if it is neither."""
    if ranks is None or isinstance(ranks, dist.ProcessGroup):
        return ranks
    found: Any = ranks
    if hasattr(found, "get_group") and getattr(found, "ndim", 0) == 1:
        group: dist.ProcessGroup = found.get_group()
        return group
    if found == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"this rank is not in the group that it gives as {argument}=: give each rank its own"
        )
    raise TypeError(
        f"{argument} is a process group, or a DeviceMesh of one dimension such as mesh['replicate'], not "
        f"{ranks!r:.80}"
    )


def _one(what: str, found: list[Any]) -> Any:
    """Return the only thing in a list; ValueError if there are several."""
    if any(each is not found[0] and each != found[0] for each in found):
        raise ValueError(
            f"the parts of this model have different {what}; attach to each part by itself, or shard all "
            "over one mesh"
        )
    return found[0]


def _same_ranks(what: str, groups: list[dist.ProcessGroup | None]) -> dist.ProcessGroup | None:
    """Return the first of some groups; ValueError if not all have the same ranks.

    Without a mesh, each call of ``fully_shard`` may make a group: it does on CPU where there is a GPU too.
    """
    _one(what, [None if group is None else dist.get_process_group_ranks(group) for group in groups])
    return groups[0]


def _alive(reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    group = reference()
    if group is None:
        raise RuntimeError("the process group of this wire has been destroyed; attach again")
    return group
