"""Means by torch's own all_reduce, for when gradwire is disabled."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.buckets import as_real


def start_plain_mean(
    flat: Tensor, group: dist.ProcessGroup, weight: float | None, *, is_sum: bool
) -> Future[Tensor]:
    """Begin to average ``flat`` in place; the result is complete when the future has been waited for."""
    total = torch.tensor(float(group.size()), dtype=torch.float64, device=flat.device)
    if weight is not None:
        total.fill_(weight)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)  # see Note [Groups by position]
        if weight == 0:
            flat.zero_()
        else:
            flat.mul_(weight)
    work = dist.all_reduce(as_real(flat), dist.ReduceOp.SUM, group, async_op=True)

    def divide(done: Future[list[Tensor]]) -> Tensor:
        done.wait()
        return flat if is_sum else flat.div_(total)

    future: Future[Tensor] = work.get_future().then(divide)
    return future
