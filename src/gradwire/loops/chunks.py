"""The flat tensors of `Averager.reduce_scatter` and `Averager.all_gather`, and a rank's chunk of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.exchanges import even_bounds
from gradwire.peers import own_world_rank

Half = Literal["reduce_scatter", "all_gather"]
"""The two halves of an average."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require_flat(tensor: object, device_types: Collection[str]) -> Tensor:
    """Return the tensor without its graph; TypeError if it is not one of values that lie in a row."""
    if not isinstance(tensor, Tensor) or hasattr(tensor, "to_local") or tensor.layout != torch.strided:
        raise TypeError(f"give a dense tensor, not {type(tensor).__name__}")
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"the tensor has dtype {tensor.dtype}, and must have one of {', '.join(map(str, _DTYPES))}"
        )
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise TypeError(
            f"the tensor must be flat: it has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            "give its .contiguous().view(-1)"
        )
    if tensor.device.type not in device_types:
        raise TypeError(
            f"the tensor is on {tensor.device}, and this averager takes tensors on "
            f"{' and '.join(device_types)}"
        )
    return tensor.detach()


def chunk_of(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's chunk."""
    start, end = even_bounds(flat.numel(), group.size())[group.rank()]
    return flat[start:end]


def make_full(shard: Tensor, numel: int | None, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor for all chunks, with this rank's in its place; ValueError if the length is wrong."""
    if numel is not None and (not isinstance(numel, int) or numel < 0):
        raise ValueError(f"numel is the length of the result, a whole number, not {numel!r}")
    total = group.size() * shard.numel() if numel is None else numel
    full = shard.new_empty(total)
    own = chunk_of(full, group)
    if own.shape != shard.shape:
        raise ValueError(
            f"rank {own_world_rank(group)} gives {shard.numel()} values, and its chunk of {total} has "
            f"{own.numel()}; give numel, the length of the result, and the shard that reduce_scatter returned"
        )
    own.copy_(shard)
    return full
