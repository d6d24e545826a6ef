"""Messages between ranks that hold different shards, over torch's own group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.averaging import Share
from gradwire.errors import PeerError, WireError, encodable
from gradwire.peers import all_gather_bytes
from gradwire.sharded.model import ShardedModel
from gradwire.sharded.units import Unit
from gradwire.tuning import StepReport


def plain_mean(unit: Unit, group: dist.ProcessGroup) -> Callable[[Tensor], None]:
    """Return an all-reduce hook that averages as torch does, for when gradwire is disabled."""

    def average(reduced: Tensor) -> None:
        dist.all_reduce(reduced, dist.ReduceOp.SUM, group)  # see Note [Groups by position]
        if not unit.divides_by_factor:
            reduced.div_(group.size())

    return average


def true_on_all(flags: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return, on their device, which flags are True on all ranks of ``group``; collective."""
    numbers = flags.to(torch.int32)
    dist.all_reduce(numbers, dist.ReduceOp.MIN, group)
    return numbers.bool()


def report_sharing(group: dist.ProcessGroup) -> Share:
    """Return a function that gathers the reports of the ranks that hold other shards, in rank order."""

    def share(report: StepReport | None) -> list[StepReport | None]:
        own = b"" if report is None else report.to_json().encode()
        return [
            StepReport.from_json(text.decode()) if text else None for text in all_gather_bytes(own, group)
        ]

    return share


def sharing(sharded: ShardedModel) -> Callable[[WireError | None], WireError | None]:
    """Return a function that tells failures to the ranks that hold other shards."""

    def share(failure: WireError | None) -> WireError | None:
        """Return the first failure of any rank that holds shards; collective.

        Other shards are averaged over other ranks, which do not see that these have failed.
        """
        flags = torch.zeros(sharded.num_shards, dtype=torch.int32, device=sharded.device)
        flags[sharded.shards.rank()] = int(failure is not None)
        dist.all_reduce(flags, group=sharded.shards)
        if not flags.any():
            return None
        own = b"" if failure is None else encodable(str(failure)).encode()
        texts = all_gather_bytes(own, sharded.shards)
        return failure or PeerError(next(filter(None, texts)).decode())

    return share
