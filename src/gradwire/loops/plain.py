"""Calls of an averager by torch's own all_reduce, for when gradwire is disabled."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.averaging import Bucket, RunState, require_weight
from gradwire.buckets import as_real
from gradwire.errors import Place, WireError
from gradwire.lanes import CollectiveWork, Lane
from gradwire.loops.chunks import Half, chunk_of
from gradwire.recipes import Recipe
from gradwire.telemetry import WireStats


class PlainEngine:
    """Averages buckets in place of an `Engine`: without encodings, without state and without a lane.

    An error of torch's is raised on the rank that sees it. Nothing is compared or counted.
    """

    failure: WireError | None = None

    def __init__(self, recipe: Recipe, group: dist.ProcessGroup, state: RunState) -> None:
        """Average or sum over ``group`` as ``recipe`` does; ``state`` is kept for checkpoints alone."""
        self.recipe = recipe
        self.state = state
        self.stats = _NoStats()
        self._group = group

    def start(self, bucket: Bucket, place: Place) -> Future[Tensor]:
        """Begin to average a bucket in place; it is averaged when the future has been waited for."""
        flat, group = bucket.flat, self._group
        # Scaled before they are added, as in DDP: in fp16, a sum may overflow where its mean does not.
        if bucket.weight is not None:
            self._weigh(flat, bucket.weight)
        elif self.recipe.reduction != "sum":
            flat.div_(group.size())
        # See Note [Groups by position].
        work = dist.all_reduce(as_real(flat), dist.ReduceOp.SUM, group, async_op=True)

        def take(done: Future[list[Tensor]]) -> Tensor:
            done.wait()
            return flat

        future: Future[Tensor] = work.get_future().then(take)
        return future

    def _weigh(self, flat: Tensor, weight: float) -> None:
        """Multiply by this rank's weight over that of all ranks; collective."""
        total = torch.full((), weight, dtype=torch.float64, device=flat.device)
        dist.all_reduce(total, dist.ReduceOp.SUM, self._group)
        require_weight(total)
        if weight == 0:
            flat.zero_()  # not a product alone: the values of a rank without weight may be infinite
        flat.mul_(weight / total)

    def swap(self, recipe: Recipe, open_lane: Callable[[], Lane]) -> None:
        """Average or sum as another recipe does from now on."""
        self.recipe = recipe

    def run_collective(self, work: CollectiveWork, place: Place, device: torch.device) -> None:
        """Do nothing: torch compares nothing either."""

    def fail(self, error: WireError) -> None:
        """Do nothing: the rank that has failed raises the error."""

    def give_up(self) -> None:
        """Do nothing: no bucket waits for another."""

    def close(self) -> None:
        """Do nothing: the group is the user's."""


class PlainHalves:
    """Runs reduce-scatters and all-gathers in place of a `HalfRunner`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def run(self, what: Half, recipe: Recipe, flat: Tensor, place: Place) -> None:
        """Run a reduce-scatter or an all-gather in place, and wait for it."""
        if what == "all_gather":
            own = chunk_of(flat, self._group)
            alone = own.clone()
            flat.zero_()
            own.copy_(alone)
        elif recipe.reduction != "sum":
            flat.div_(self._group.size())
        dist.all_reduce(flat, dist.ReduceOp.SUM, self._group)


class _NoStats:
    """Statistics of torch's collectives, which are not known."""

    def read(self, num_steps: int) -> WireStats:
        return WireStats(0, None, None, None, None, ())
