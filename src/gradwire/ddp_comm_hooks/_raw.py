"""Recipes as raw hooks, to register with ``model.register_comm_hook(process_group, hook)``."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.buckets import Layouts
from gradwire.ddp import Bridge, open_raw_engine
from gradwire.peers import own_world_rank
from gradwire.recipes import Recipe
from gradwire.torch_private import GradBucket, backward_pass


class _Models:
    """The bridges of all models that run one recipe as a raw hook; each lives as long as its parameters.

    DDP does not tell a hook to which model a bucket belongs, so parameters identify a model. A bucket of new
    parameters belongs to a new model, unless an earlier bucket of the same backward pass had a bridge. So
    models that share parameters, or their first backward pass, share a bridge.
    """

    def __init__(self) -> None:
        self._bridges = WeakTensorKeyDictionary()  # by parameter
        self._latest: tuple[int, weakref.ref[Bridge]] | None = None

    def bridge_of(self, bucket: GradBucket, make: Callable[[], Bridge]) -> Bridge:
        """Return the bridge of the bucket's model; make one if the model is new."""
        parameters = bucket.parameters()
        bridge: Bridge | None = next((self._bridges[p] for p in parameters if p in self._bridges), None)
        if bridge is None:
            bridge = self._of_this_pass(bucket) or make()
            for parameter in parameters:
                self._bridges[parameter] = bridge
        self._latest = backward_pass(), weakref.ref(bridge)
        return bridge

    def _of_this_pass(self, bucket: GradBucket) -> Bridge | None:
        if self._latest is None:
            return None
        number, bridge = self._latest
        # Outside a backward pass, as in ``join()``, all buckets of one model come before those of the next.
        is_same_pass = number == backward_pass() if backward_pass() != -1 else bucket.index() > 0
        return bridge() if is_same_pass else None


_models: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Recipe, str], _Models]] = (
    weakref.WeakKeyDictionary()
)


def run_recipe(recipe: Recipe, process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average ``bucket`` over a group, by default the world, with one engine per group, recipe and model.

    The engine is opened at the model's first bucket, which comes on every rank of the group.
    """
    group = group_or_world(process_group)
    device = bucket.buffer().device
    models = _models.setdefault(group, {}).setdefault((recipe, device.type), _Models())

    def make() -> Bridge:
        return Bridge(open_raw_engine(recipe, group, bucket), Layouts(), own_world_rank(group))

    return models.bridge_of(bucket, make).run(bucket)


def group_or_world(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group, or the world for None; TypeError for anything else."""
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "this hook's state must be a process group of which this rank is a member, or None for the "
            f"world, not {type(group).__name__}"
        )
    return group
