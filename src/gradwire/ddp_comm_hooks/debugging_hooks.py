"""Hooks for measurements."""

from typing import Any

from torch import Tensor
from torch.futures import Future

from gradwire.ddp import HookInfo, register_hook_info
from gradwire.lanes import completed
from gradwire.recipes import noop
from gradwire.torch_private import GradBucket

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Leave the bucket as it is, to measure a step without communication."""
    return completed(bucket.buffer())


register_hook_info(noop_hook, HookInfo(recipe=noop()))
