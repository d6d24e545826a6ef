"""Reduce-scatters and all-gathers of an averager, each half of an average, on its engine."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gradwire.averaging import Bucket, Engine
from gradwire.buckets import BucketLayout, Slot, dtype_name
from gradwire.errors import Place
from gradwire.loops.chunks import Half
from gradwire.loops.plain import PlainEngine
from gradwire.peers import SealedClaim, require_same
from gradwire.recipes import Recipe

# No tensor of an average has this name, so none of their residuals belongs to it.
_NAME = "(a flat tensor)"


def compare(claim: SealedClaim, engine: Engine | PlainEngine, place: Place, device: torch.device) -> None:
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

    def run(self, what: Half, recipe: Recipe, flat: Tensor, place: Place) -> None:
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
def _claim_of(what: Half, numel: int, dtype: torch.dtype) -> SealedClaim:
    """Return the claim that ranks compare."""
    return SealedClaim({"call": what, "tensor": f"{numel} values, {dtype_name(dtype)}"})
