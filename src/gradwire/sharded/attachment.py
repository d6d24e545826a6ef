"""The parts behind a `Wire` on a sharded model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.averaging import Engine, Tuned, checkpoint
from gradwire.buckets import BucketLayout
from gradwire.codecs import Codec
from gradwire.ddp import Attachment, Choice
from gradwire.errors import WireError
from gradwire.recipes import Recipe, Tuning, WirePlan, make_plan, recipes_without_residuals
from gradwire.sharded.backward import Backward
from gradwire.sharded.model import ShardedModel
from gradwire.sharded.shard_group import report_sharing
from gradwire.sharded.weights import gather_bytes, goes_as_it_is


class ShardedAttachment(Attachment):
    """The parts that one `attach` to a sharded model has put together; internal to gradwire."""

    def __init__(
        self,
        model: ShardedModel,
        backward: Backward,
        choice: Choice,
        timeout: timedelta,
        undo: contextlib.ExitStack,
        weights: Codec | None = None,
        *,
        is_disabled: bool = False,
    ) -> None:
        self._model = model
        self._backward = backward
        self._undo = undo
        self._weights = weights
        self._group = weakref.ref(model.group)
        self._is_attached = not is_disabled
        super().__init__(
            backward,
            choice,
            model.rank,
            model.world_size,
            timeout,
            num_shards=model.num_shards,
            is_disabled=is_disabled,
        )

    @property
    def model(self) -> nn.Module:
        return self._model.root

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        return self._model.group if group is None else group

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def is_attached(self) -> bool:
        return self._is_attached

    @property
    def failure(self) -> WireError | None:
        return self._backward.failure or self._backward.engine.failure

    def resolve(self, recipe: Recipe) -> Recipe:
        return self._model.resolve(recipe)

    def claim(self, chosen: dict[str, str]) -> dict[str, str]:
        return self._model.claim(chosen)

    def seen_layouts(self) -> tuple[BucketLayout, ...]:
        return self._backward.current()

    def plan(self, recipe: Recipe, step: int | None) -> WirePlan:
        layouts = self._backward.current() or self._model.expected_layouts()
        plan = make_plan(recipe, layouts, self.group.rank(), self.group.size(), step)
        units, codec, num_peers = self._model.units, self._weights, self._model.num_shards - 1
        sent = sum(unit.num_gathers * num_peers * gather_bytes(unit, codec) for unit in units)
        is_encoded = codec is not None and any(not goes_as_it_is(codec, u.gather_dtype) for u in units)
        what = "encoded parameters" if is_encoded else "parameters"
        note = f"Beside gradients, {what} are gathered: {sent:,} bytes sent in a step."
        for name in recipes_without_residuals(recipe):
            note += f"\nNo residuals: a reduce-scatter keeps none, so {name} goes without its error feedback."
        return replace(plan, note=note, bytes_gathered=sent)

    def read(self, state: Mapping[str, Any]) -> checkpoint.Saved:
        trained = self._model.trained()
        whole = {each.name: torch.empty(each.shape, device="meta") for each in trained}
        shard_dims = {each.name: each.shard_dim for each in trained}
        return checkpoint.read(state, whole, (), self.rank, self.grid, "mean", shard_dims)

    def other_shards(self) -> dist.ProcessGroup | None:
        return self._model.shards if self._model.has_replicas else None

    def state_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.group, self._model.shards) if self._model.has_replicas else (self.group,)

    def make_tuner(self, tuning: Tuning, engine: Engine, **options: Any) -> Tuned:
        if self._model.has_replicas:
            options["share"] = report_sharing(self._model.shards)
        return super().make_tuner(tuning, engine, **options)

    def leave(self) -> None:
        self._is_attached = False
        self._undo.close()
