"""Recipes as plain hook functions, for ``model.register_comm_hook(process_group, hook)``."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradwire.agreement import next_meeting
from gradwire.bridge import Bridge
from gradwire.execution import open_lane
from gradwire.layout import Layouts
from gradwire.recipes import Recipe
from gradwire.runners import RecipeRunner

_bridges: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Recipe, str], Bridge]] = (
    weakref.WeakKeyDictionary()
)


def run_recipe(recipe: Recipe, process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average ``bucket`` over a group, by default the world, with a lane per group and recipe.

    The lane is opened at the first bucket, which every rank of the group reaches.
    """
    group = group_or_world(process_group)
    device = bucket.buffer().device
    bridges = _bridges.setdefault(group, {})
    bridge = bridges.get((recipe, device.type))
    if bridge is None:
        lane = open_lane(group, device, next_meeting(group), late=True)
        bridge = bridges[recipe, device.type] = Bridge(RecipeRunner(recipe, lane, Layouts()), group.rank())
    return bridge.run(bucket)


def group_or_world(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that a raw hook's state stands for; TypeError if it is none."""
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "this hook's state must be a process group of which this rank is a member, or None for the "
            f"world, not {type(group).__name__}"
        )
    return group
