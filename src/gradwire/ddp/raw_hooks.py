"""Engines and bridges for raw hooks, which are registered with DDP itself and not with `attach`.

A raw hook sees its model and its ranks only when its first bucket comes, which happens on every rank. It must
not wait for other ranks, since autograd's thread runs it. DDP inspects the annotations of a hook, so this
module keeps them as objects.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.averaging import Engine, LayoutCheck, RunState, open_engine
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_info import Hook, HookInfo, register_hook_info
from gradwire.lanes import Lane, open_lane
from gradwire.peers import next_rendezvous, timeout_of
from gradwire.recipes import Recipe
from gradwire.torch_private import GradBucket

OpenBridge = Callable[[Any, GradBucket], Bridge]
"""Open the bridge of a hook, given the hook's state and first bucket."""


def open_raw_lane(group: dist.ProcessGroup, bucket: GradBucket) -> Lane:
    """Open a lane for a raw hook; it connects while buckets queue."""
    return open_lane(group, bucket.buffer().device, next_rendezvous(group, timeout_of(group)), late=True)


def open_raw_engine(
    recipe: Recipe,
    group: dist.ProcessGroup,
    bucket: GradBucket,
    state: RunState | None = None,
    *,
    layout_check: LayoutCheck | None = None,
    may_have_unused: bool = False,
) -> Engine:
    """Open an engine for a raw hook; its lane connects while buckets queue."""
    return open_engine(
        recipe,
        group,
        bucket.buffer().device,
        next_rendezvous(group, timeout_of(group)),
        state,
        late=True,
        layout_check=layout_check,
        may_have_unused=may_have_unused,
    )


def hook_with_bridge(open_bridge: OpenBridge, name: str, info: HookInfo) -> Hook:
    """Return a hook that opens a bridge at its first bucket, and averages all buckets over it."""
    bridges: list[Bridge] = []

    def hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        if not bridges:
            bridges.append(open_bridge(state, bucket))
        return bridges[0].run(bucket)

    hook.__module__, hook.__qualname__ = open_bridge.__module__, name
    register_hook_info(hook, info)
    return hook
