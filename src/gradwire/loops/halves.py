"""The flat tensors of `Averager.reduce_scatter` and `Averager.all_gather`."""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.averaging import Bucket, Engine
from gradwire.buckets import BucketLayout, Slot, dtype_name
from gradwire.errors import Place
from gradwire.exchanges import even_bounds
from gradwire.peers import SealedClaim, require_same
from gradwire.recipes import Recipe

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# No tensor of an average has this name, so none of their residuals belongs to it.
_NAME = "(a flat tensor)"


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
            f"rank {group.rank()} gives {shard.numel()} values, and its chunk of {total} has {own.numel()}; "
            "give numel, the length of the result, and the shard that reduce_scatter returned"
        )
    own.copy_(shard)
    return full


def compare(claim: SealedClaim, engine: Engine, place: Place, device: torch.device) -> None:
    """Compare a claim with the other ranks', and wait for the result."""
    engine.run_collective(functools.partial(require_same, claim), place, device)
    if engine.failure is not None:
        raise engine.failure


class HalfRunner:
    """Runs reduce-scatters and all-gathers on an engine."""

    def __init__(self, engine: Engine, device: torch.device | None) -> None:
        """Run on ``engine``; on NCCL give the ``device``, to compare new calls with the other ranks'."""
        self._engine = engine
        self._device = device
        self._compared: set[SealedClaim] = set()

    def run(self, what: str, recipe: Recipe, flat: Tensor, place: Place) -> None:
        """Run a reduce-scatter or an all-gather in place, and wait for it."""
        claim, exchange = _claim_of(what, flat.numel(), flat.dtype), recipe.exchange
        if self._device is not None and claim not in self._compared and exchange.communicates:
            self._compared.add(claim)
            compare(claim, self._engine, place, self._device)
        layout = _layout_of(flat.numel(), flat.dtype)
        self._engine.start(Bucket(flat, layout, is_last=True, claim=claim, exchange=exchange), place).wait()


@functools.lru_cache(256)
def _layout_of(numel: int, dtype: torch.dtype) -> BucketLayout:
    """Return the layout of a flat tensor."""
    return BucketLayout.packed(0, dtype, [Slot(_NAME, 0, torch.Size([numel]), (1,))])


@functools.lru_cache(256)
def _claim_of(what: str, numel: int, dtype: torch.dtype) -> SealedClaim:
    """Return the claim that ranks compare."""
    return SealedClaim({"call": what, "tensor": f"{numel} values, {dtype_name(dtype)}"})


def scatter_plainly(flat: Tensor, group: dist.ProcessGroup, *, is_sum: bool) -> Tensor:
    """Reduce-scatter by torch's own all_reduce, for when gradwire is disabled."""
    total = flat.clone()
    dist.all_reduce(total, dist.ReduceOp.SUM, group)  # see Note [Groups by position]
    own = chunk_of(total, group).clone()
    return own if is_sum else own.div_(group.size())


def gather_plainly(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather by torch's own all_reduce, for when gradwire is disabled."""
    alone = torch.zeros_like(full)
    chunk_of(alone, group).copy_(chunk_of(full, group))
    dist.all_reduce(alone, dist.ReduceOp.SUM, group)
    return alone
