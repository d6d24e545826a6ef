"""Sites: local SGD trains a copy of the model on each, on one rank or sharded over several."""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.averaging import Grid, checkpoint, is_disabled
from gradwire.buckets import Layouts, canonical_name, trainable_parameters
from gradwire.ddp import (
    Wire,
    bucketed_parameters,
    claim_of,
    ddp_attachment_of,
    device_of,
    is_ddp,
    resolve_for_model,
    trained_parameters,
    unwrap,
)
from gradwire.recipes import Recipe, fingerprint, fp32, resolve_for_module
from gradwire.sharded import ShardedModel, ShardLayouts, attach, group_of, is_sharded, sharing
from gradwire.torch_private import uncompiled
from gradwire.training.parameter_buckets import MakesLayouts
from gradwire.training.site_call import SitesCall
from gradwire.training.site_ranks import OneRank, ShardRanks, SiteRanks

log = logging.getLogger("gradwire")


class Site(abc.ABC):
    """A model, the ranks that it lies on, and those that hold the same values on other sites."""

    module: nn.Module
    group: dist.ProcessGroup
    """The ranks to average with: one of each site."""
    ranks: SiteRanks
    """The ranks of this site."""
    layouts: MakesLayouts
    shards: dist.ProcessGroup | None = None
    """The ranks of this site, if the model is sharded over them."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device of the parameters; ValueError if none is trained."""

    @abc.abstractmethod
    def resolve(self, recipe: Recipe) -> Recipe:
        """Return ``recipe`` for this model; ValueError if it does not fit."""

    @abc.abstractmethod
    def claim(self, chosen: dict[str, str]) -> dict[str, str]:
        """Return the facts that must be equal on all ranks: the ``chosen`` ones, and those of the model."""

    @abc.abstractmethod
    def attach(self, recipe: Recipe, timeout: timedelta) -> Wire | None:
        """Average gradients over sites by ``recipe``; collective. None if there is nothing to attach to."""

    @abc.abstractmethod
    def regrouped(self, sites: object) -> Site:
        """Return this site among others; TypeError or ValueError if it cannot be averaged with them."""

    @property
    def grid(self) -> Grid:
        """The ranks of all sites, as states count them."""
        return Grid(self.group.size())

    @property
    def rank(self) -> int:
        """This rank in the grid."""
        return self.ranks.rank

    @property
    def state_groups(self) -> Sequence[dist.ProcessGroup]:
        """The groups over which states are gathered, one after the other."""
        return (self.group,) if self.shards is None else (self.group, self.shards)

    def call(self, timeout: timedelta, caller: str) -> SitesCall:
        """Return a collective call of all ranks of all sites."""
        return SitesCall(self.group, self.shards, timeout, caller)

    def check_steps_may_differ(self) -> None:  # noqa: B027  # most sites have nothing to check
        """Raise ValueError if sites communicate in each step: then they take as many steps."""

    def prepare(self) -> None:  # noqa: B027  # most sites have nothing to do
        """Let parameters be read and written."""

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name, with their whole shapes."""
        return {canonical_name(name): parameter for name, parameter in self.module.named_parameters()}

    def shard_dims(self) -> dict[str, int]:
        """Return the dimensions in which parameters are cut."""
        return {}

    def read_wire(self, state: Mapping[str, Any]) -> checkpoint.Saved:
        """Check the state of the wire that averages gradients; ValueError says what does not fit."""
        return self.read(state)

    def read(self, state: Mapping[str, Any]) -> checkpoint.Saved:
        """Check the state of averagings and return it; ValueError says what does not fit."""
        whole, dims = self.whole_parameters(), self.shard_dims()
        return checkpoint.read(state, whole, (), self.rank, self.grid, "mean", dims)


class DDPSite(Site):
    """A rank of a ``DistributedDataParallel``."""

    def __init__(self, model: nn.Module) -> None:
        """Take the model; TypeError if it is of another kind."""
        self._ddp = unwrap(model)
        self.module = self._ddp.module
        self.group = self._ddp.process_group
        self.ranks = OneRank(self.group.rank())
        self.layouts = Layouts(self.module)

    @property
    def device(self) -> torch.device:
        return device_of(self._ddp)

    def resolve(self, recipe: Recipe) -> Recipe:
        return resolve_for_model(recipe, self._ddp)

    def claim(self, chosen: dict[str, str]) -> dict[str, str]:
        return claim_of(self._ddp, chosen)

    def attach(self, recipe: Recipe, timeout: timedelta) -> Wire:
        wire = attach(self._ddp, recipe, timeout=timeout)
        ddp_attachment_of(wire).slot.owner = "a gradwire.LocalSGD"
        return wire

    def regrouped(self, sites: object) -> Site:
        raise TypeError(
            "a DistributedDataParallel keeps its process group: give LocalSGD the plain model and sites=, or "
            "make both anew with another group, and call resume"
        )

    def check_steps_may_differ(self) -> None:
        if self._ddp.broadcast_buffers and next(self.module.buffers(), None) is not None:
            # torch 2.13 has renamed the argument, and warns of the name before.
            is_renamed = hasattr(self._ddp, "forward_sync_buffers")
            raise ValueError(
                "with a period in seconds, ranks take different numbers of steps, but DDP broadcasts this "
                f"model's buffers in each: make it with {'forward_sync' if is_renamed else 'broadcast'}"
                "_buffers=False"
            )
        if self._ddp.find_unused_parameters:
            raise ValueError(
                "with a period in seconds, ranks take different numbers of steps, but DDP compares unused "
                "parameters in each: make it with find_unused_parameters=False"
            )

    def read_wire(self, state: Mapping[str, Any]) -> checkpoint.Saved:
        may_be, must_be = bucketed_parameters(self._ddp), trained_parameters(self._ddp).keys()
        return checkpoint.read(state, may_be, must_be, self.rank, self.grid, "mean")


class ShardedSite(Site):
    """A rank of a model that ``fully_shard`` has sharded over the ranks of a site."""

    def __init__(self, root: nn.Module, sites: object) -> None:
        """Take the model, and the ranks that hold the same shard; TypeError or ValueError if unfit."""
        self._model = model = ShardedModel(root, group_of(sites, "sites"))
        if not model.has_replicas:
            raise ValueError(
                "a sharded model needs sites=, the ranks that hold the same shard on other sites: a process "
                "group, or a DeviceMesh of one dimension such as mesh['site']"
            )
        for each in model.trained():
            if each.parameter.shape != each.shape:
                raise ValueError(
                    f"parameter {each.name!r} is also sharded by tensor parallelism, which LocalSGD does not "
                    "support: shard each site by fully_shard alone"
                )
        self.module = root
        self.group, self.shards = model.group, model.shards
        self.ranks = ShardRanks(model.rank, model.shards, model.device, sharing(model))
        self.layouts = ShardLayouts(model)

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def grid(self) -> Grid:
        return Grid(self._model.world_size, self._model.num_shards)

    def resolve(self, recipe: Recipe) -> Recipe:
        return self._model.resolve(recipe)

    def claim(self, chosen: dict[str, str]) -> dict[str, str]:
        return self._model.claim(chosen)

    def attach(self, recipe: Recipe, timeout: timedelta) -> Wire:
        return attach(self.module, recipe, replicas=self.group, timeout=timeout)

    def regrouped(self, sites: object) -> Site:
        if self._model.is_native_hsdp:
            raise TypeError(
                "this model was sharded over a mesh of all sites, which it keeps: shard it over the ranks of "
                "its site alone, and give LocalSGD sites="
            )
        return ShardedSite(self.module, sites)

    def prepare(self) -> None:
        # After a forward pass without a backward pass, torch keeps the root's parameters gathered.
        for unit in self._model.units:
            unit.module.reshard()

    def whole_parameters(self) -> dict[str, Tensor]:
        known = [each for unit in self._model.units for each in unit.parameters]
        return {each.name: torch.empty(each.shape, device="meta") for each in known}

    def shard_dims(self) -> dict[str, int]:
        return {each.name: each.shard_dim for unit in self._model.units for each in unit.parameters}


class PlainSite(Site):
    """A rank with a plain model, which nothing else averages."""

    def __init__(self, module: nn.Module, sites: object) -> None:
        """Take the model, and the ranks to average with; TypeError or ValueError if unfit."""
        found = group_of(sites, "sites")
        if found is None:
            raise TypeError("a plain model needs the ranks to average with: a process group, not None")
        self.module, self.group = module, found
        self.ranks = OneRank(found.rank())
        self.layouts = Layouts(module)

    @property
    def device(self) -> torch.device:
        return next(iter(self._trained().values())).device

    def resolve(self, recipe: Recipe) -> Recipe:
        if is_disabled():
            log.warning("GRADWIRE_DISABLE is set: fp32 averages parameters instead of %s", recipe)
            recipe = fp32()
        return resolve_for_module(recipe, self.module, self._trained(), self.group.size())

    def claim(self, chosen: dict[str, str]) -> dict[str, str]:
        parameters = fingerprint.of_parameters(self._trained().items())
        return {**fingerprint.of_version(), **chosen, **parameters}

    def attach(self, recipe: Recipe, timeout: timedelta) -> Wire | None:
        if recipe.exchange.communicates:
            raise ValueError(
                "nothing averages the gradients of a plain model during warm-up: leave warmup_steps out, or "
                "give a DistributedDataParallel or a sharded model"
            )
        return None

    def regrouped(self, sites: object) -> Site:
        return PlainSite(self.module, sites)

    def _trained(self) -> dict[str, nn.Parameter]:
        found = trainable_parameters(self.module)
        if not found:
            raise ValueError("no parameter of this model requires a gradient: there is nothing to average")
        return found


def find_site(model: nn.Module, sites: object) -> Site:
    """Return the site of a model; TypeError or ValueError if it cannot be averaged."""
    root = uncompiled(model)
    if is_sharded(root):
        return ShardedSite(root, sites)
    if sites is None:
        if not is_ddp(root):
            raise TypeError(
                f"LocalSGD needs to know the ranks to average with: wrap {type(root).__name__} in "
                "DistributedDataParallel, shard it with fully_shard, or give sites=, a process group"
            )
        return DDPSite(model)
    if is_ddp(root):
        raise TypeError("sites= goes with a plain or sharded model: a DistributedDataParallel has its group")
    return PlainSite(root, sites)
