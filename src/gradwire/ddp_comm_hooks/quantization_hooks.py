"""8-bit averaging with one affine range per message, or per group of values.

Ranges are computed as in torch, messages differ. torch's hooks gather every rank's gradients on every rank,
so their bytes grow with the number of ranks. Ours send about two bytes per value, for any number of ranks.

DDP inspects the annotations of a hook, so this module keeps them as objects.
"""

import functools

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.codecs import Affine
from gradwire.ddp import HookInfo, register_hook_info
from gradwire.ddp_comm_hooks._raw import run_recipe
from gradwire.exchanges import TwoShot
from gradwire.recipes import Recipe
from gradwire.torch_private import GradBucket

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

_PER_TENSOR = Recipe("quantization_pertensor", TwoShot(Affine()))


@functools.cache
def _per_channel(bucket_size: int) -> Recipe:
    return Recipe(f"quantization_perchannel of {bucket_size}", TwoShot(Affine(bucket_size)))


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average gradients in 8 bits, with one range per message, which is one rank's part of the bucket."""
    return run_recipe(_PER_TENSOR, process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> Future[torch.Tensor]:
    """Average gradients in 8 bits, with one range for every ``bucket_size`` values."""
    return run_recipe(_per_channel(bucket_size), process_group, bucket)


register_hook_info(quantization_pertensor_hook, HookInfo(recipe=_PER_TENSOR))
register_hook_info(quantization_perchannel_hook, HookInfo(recipe=_per_channel(512)))
