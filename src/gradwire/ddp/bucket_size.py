"""The size of DDP's buckets that suits a recipe."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.buckets import Layouts, trainable_parameters
from gradwire.ddp.models import trained_parameters
from gradwire.recipes import Recipe, route_module_tables
from gradwire.torch_private import ddp_facts

log = logging.getLogger("gradwire")

# A step ends when its last bucket is averaged, so small buckets let it end sooner. But each costs messages:
# what a recipe sends of a bucket should take longer than they do. On CUDA, buckets share messages.
_SMALL_MB, _LARGE_MB = 8.0, 25.0
# Small buckets are faster on CPU if a large one would take longer than this on the link. Steps of int8, with
# 8 MB over 25: 0.87 at 1 Gbit/s, where a large bucket takes 52 ms, and 1.00 at 2.5 (21 ms); of bf16 0.88 at
# 2.5 (42 ms) and 0.96 at 5 (21 ms); of fp32 0.92 at 5 (42 ms) and 0.98 at 10 (21 ms). int8 takes 1.04 there.
_LONG_S = 0.03
# The link, if nobody says which it is.
_USUAL_BITS_PER_S = 1e9


def best_bucket_mb(
    recipe: Recipe, module: nn.Module, trained: Iterable[nn.Parameter], bits_per_s: float | None = None
) -> float | None:
    """Return the ``bucket_cap_mb`` with which a recipe is fastest; None for DDP's own.

    ``bits_per_s`` is the rate of the links between nodes; by default 1 Gbit/s.
    """
    parameters = list(trained)
    if not parameters or parameters[0].device.type != "cpu":
        return None
    sent_bits = 8 * 2**20 * _LARGE_MB * _sent_share(recipe, module, parameters)
    return _SMALL_MB if sent_bits >= _LONG_S * (bits_per_s or _USUAL_BITS_PER_S) else None


def _sent_share(recipe: Recipe, module: nn.Module, parameters: Sequence[nn.Parameter]) -> float:
    """Return what one of two nodes sends to the other in a step, over the bytes of all gradients."""
    ids = {id(parameter) for parameter in parameters}
    named = {name: p for name, p in trainable_parameters(module).items() if id(p) in ids}
    exchange = route_module_tables(recipe, module, named).exchange
    node_size = math.lcm(*(each.local_size or 1 for each in recipe.leaves()))
    sent = whole = 0
    for layout in Layouts(module).one_per_dtype(list(parameters)):
        whole += layout.numel * layout.dtype.itemsize
        by_rank = exchange.link_bytes(layout, 2 * node_size, exchange.starts[-1])
        sent += sum(links.across for links in by_rank[:node_size])
    return sent / whole if whole else 0.0  # parameters may be empty


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
