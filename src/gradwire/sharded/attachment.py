"""The parts behind a `Wire` on a sharded model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.averaging import Engine, Tuned, checkpoint
from gradwire.buckets import BucketLayout
from gradwire.ddp import Attached, Choice
from gradwire.errors import WireError
from gradwire.recipes import Recipe, Tuning, WirePlan, make_plan
from gradwire.sharded.backward import Backward
from gradwire.sharded.model import ShardedModel
from gradwire.sharded.shard_group import report_sharing


class ShardedAttachment(Attached):
    """The parts that one `attach` to a sharded model has put together; internal to gradwire.

    States count ranks replica by replica: rank ``r * S + s`` holds shard s of S in replica r.
    """

    def __init__(
        self,
        model: ShardedModel,
        backward: Backward,
        choice: Choice,
        timeout: timedelta,
        undo: contextlib.ExitStack,
        *,
        is_disabled: bool = False,
    ) -> None:
        self._model = model
        self._backward = backward
        self._undo = undo
        self._group = weakref.ref(model.group)
        self._is_attached = not is_disabled
        super().__init__(backward, choice, model.rank, model.world_size, timeout, is_disabled=is_disabled)

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
        return make_plan(recipe, layouts, self.group.rank(), self.group.size(), step)

    def read(self, state: Mapping[str, Any]) -> checkpoint.Saved:
        shapes = {each.name: torch.empty(each.padded_shape, device="meta") for each in self._model.trained()}
        return _read(state, shapes, self._model)

    def state_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.group, self._model.shards) if self._model.has_replicas else (self.group,)

    def make_tuner(self, tuning: Tuning, engine: Engine, **options: Any) -> Tuned:
        return super().make_tuner(tuning, engine, share=report_sharing(self._model.shards), **options)

    def leave(self) -> None:
        self._is_attached = False
        self._undo.close()


def _read(state: Mapping[str, Any], shards: Mapping[str, Tensor], model: ShardedModel) -> checkpoint.Saved:
    """Return this rank's state, also from another number of replicas; ValueError if shards do not fit."""
    fields = checkpoint.check_fields(state)
    num_shards, shard = model.num_shards, model.rank % model.num_shards
    if fields.world_size % num_shards and fields.entries:
        raise ValueError(
            f"this state was saved on {fields.world_size} ranks, which cannot be replicas of {num_shards} "
            "shards: what it holds back belongs to other shards. Load it with as many shards as it was saved"
        )
    if not fields.entries:
        num_shards, shard = 1, 0
    # The ranks that hold the same shard, one for each replica, are those that averaged together.
    memory = {f"rank{r}": states for r, states in enumerate(_of_shard(state, fields, num_shards, shard))}
    own = {**state, "world_size": fields.world_size // num_shards, "memory": memory}
    if fields.world_size == model.world_size and fields.entries:
        own["memory"] = {k: v for k, v in memory.items() if k == f"rank{model.rank // num_shards}" and v}
    rank, size = model.rank // model.num_shards, model.world_size // model.num_shards
    return checkpoint.read(own, shards, (), rank, size, "mean")


def _of_shard(
    state: Mapping[str, Any], fields: checkpoint.Fields, num_shards: int, shard: int
) -> Sequence[Any]:
    ranks = range(shard, fields.world_size, num_shards)
    return [state["memory"].get(f"rank{rank}", {}) for rank in ranks]
