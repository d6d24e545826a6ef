"""The size of DDP's buckets that suits a recipe."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.buckets import Layouts
from gradwire.ddp.models import trained_parameters
from gradwire.recipes import Recipe
from gradwire.torch_private import ddp_facts

log = logging.getLogger("gradwire")

# A step ends when its last bucket is averaged, so small buckets let it end sooner. But each costs messages:
# what a recipe sends of a bucket should take longer than they do. On CUDA, buckets share messages.
_SMALL_MB = 8.0
# The share of its bytes that a recipe sends of a bucket, from which on small buckets are faster on CPU.
_LARGE_SHARE = 0.2


def best_bucket_mb(recipe: Recipe, module: nn.Module, trained: Iterable[nn.Parameter]) -> float | None:
    """Return the ``bucket_cap_mb`` with which a recipe is fastest; None for DDP's own."""
    parameters = list(trained)
    if not parameters or parameters[0].device.type != "cpu":
        return None
    exchange, sent, whole = recipe.exchange, 0, 0
    for layout in Layouts(module).one_per_dtype(list(parameters)):
        num_bytes = layout.numel * layout.dtype.itemsize
        whole += num_bytes
        sent += exchange.shared_bytes(layout, exchange.starts[-1]) or num_bytes
    return _SMALL_MB if sent >= _LARGE_SHARE * whole else None


def suggest_buckets(ddp: DistributedDataParallel, recipe: Recipe) -> None:
    """Log what to write instead, once, if a recipe would be faster with smaller buckets than DDP's."""
    facts = ddp_facts(ddp)
    used, whole = (facts[name] / 2**20 for name in ("bucket_cap_bytes", "total_parameter_size_bytes"))
    if ddp.process_group.rank() != 0 or min(used, whole) <= 2 * _SMALL_MB or not recipe.exchange.communicates:
        return
    best = best_bucket_mb(recipe, ddp.module, trained_parameters(ddp).values())
    if best is not None:
        _log_once(
            f"buckets of {used:g} MB are large for {recipe}, and a step waits for the last of them; make the "
            f"model by gradwire.wrap(module, {str(recipe)!r}), or with bucket_cap_mb={best:g}"
        )


@functools.cache
def _log_once(text: str) -> None:
    log.info(text)
