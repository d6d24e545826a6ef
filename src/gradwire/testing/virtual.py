"""Many data-parallel workers with one copy of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from gradwire import checkpoint
from gradwire.exchanges import Context, Scratch
from gradwire.fitting import with_tables_apart
from gradwire.layout import BucketLayout, Layouts, canonical_name
from gradwire.memory import Memory
from gradwire.recipes import Recipe
from gradwire.recipes import recipe as parse_recipe
from gradwire.regroup import grouping_of
from gradwire.testing.virtual_group import run_virtual_ranks
from gradwire.transport import Group, Traffic


class VirtualRanks:
    """Data-parallel workers that share one model in one process, with a recipe between them.

    What differs from worker to worker is kept for each: gradients, residuals and whatever else a recipe
    remembers. The rest is the same on all workers, since all step with the same bits, and is there once.
    Gradients lie in buckets as in ``DistributedDataParallel``, the last parameter first; the averaging
    is the code that real ranks run, and ends with the same bits.

    Args:
        model: a model of parameters on one device, not wrapped.
        recipe: what goes over the wire, as for `gradwire.attach`.
        world_size: how many workers.
        bucket_cap_mb: how many MiB fill a bucket, as for ``DistributedDataParallel``.

    Raises ValueError for a recipe that does not communicate, or if there is nothing to average.

    >>> model = nn.Linear(4, 1)
    >>> ranks = VirtualRanks(model, "int8", world_size=16)
    >>> for rank in range(16):
    ...     with ranks.backward_of(rank):  # on this worker's part of the batch
    ...         model(torch.randn(2, 4)).mean().backward()
    >>> ranks.average()  # from here on, as in any training loop: clip, step
    >>> torch.equal(ranks.gradients(0)["weight"], ranks.gradients(15)["weight"])
    True
    """

    def __init__(
        self, model: nn.Module, recipe: str | Recipe, world_size: int, *, bucket_cap_mb: float = 25.0
    ) -> None:
        self.recipe = parse_recipe(recipe)
        if not self.recipe.exchange.communicates:
            raise ValueError(
                f"virtual ranks share one model, so their recipe has to average: {recipe} does not"
            )
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self.world_size = world_size
        # In the order of a bucket: backward has the last one's gradient first.
        self._parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        if not self._parameters:
            raise ValueError("the model has no parameter that requires a gradient: nothing to average")
        trained = [canonical_name(name) for name, p in model.named_parameters() if p.requires_grad]
        self.recipe = with_tables_apart(self.recipe, model, trained)
        self.layouts = _bucketed(model, self._parameters, bucket_cap_mb)
        """Which parameter lies where in each bucket."""
        device = self._parameters[0].device
        self._buckets = [
            [torch.zeros(layout.numel, dtype=layout.dtype, device=device) for layout in self.layouts]
            for _ in range(world_size)
        ]
        # Made once: a model has hundreds, to be shown again for every rank in every step.
        self._views = [list(self.gradients(rank).values()) for rank in range(world_size)]
        self._scratches = [Scratch() for _ in range(world_size)]
        self.memories = [Memory() for _ in range(world_size)]
        """What the recipe remembers, by rank: ``memories[3].named()["residual"]["fc.weight"]``."""
        self.traffic = [Traffic() for _ in range(world_size)]
        """What each rank has sent."""
        self.num_steps = 0
        self._ready: set[int] = set()

    @contextmanager
    def backward_of(self, rank: int) -> Iterator[None]:
        """Inside, backward passes add to the gradients of ``rank``, which start at zero."""
        for bucket in self._buckets[rank]:
            bucket.zero_()
        self._show(rank)
        yield
        self._ready.add(rank)

    def average(self) -> None:
        """Average the ranks' gradients; each parameter's ``grad`` is then the mean.

        Raises ValueError if a rank has had no `backward_of` in this step, `RanksFailed` if averaging fails.
        """
        missing = sorted(set(range(self.world_size)) - self._ready)
        if missing:
            raise ValueError(f"rank(s) {', '.join(map(str, missing))} have no gradients in this step")
        traffic = run_virtual_ranks(self._average, self.world_size)
        for total, sent in zip(self.traffic, traffic, strict=True):
            total.bytes_sent += sent.bytes_sent
            total.num_messages += sent.num_messages
        self.num_steps += 1
        self._ready.clear()
        self._show(0)

    def gradients(self, rank: int) -> dict[str, Tensor]:
        """The gradients of ``rank`` by parameter, as views; after `average`, their mean."""
        return {
            name: view
            for layout, bucket in zip(self.layouts, self._buckets[rank], strict=True)
            for name, view in layout.views(bucket).items()
        }

    def state_dict(self) -> dict[str, Any]:
        """What all ranks need to go on bit for bit, between steps; `load_state_dict` takes it back.

        It is what `gradwire.merge_state_dicts` makes of the states of as many real ranks, and
        `Wire.load_state_dict` takes it.
        """
        recipe, timeline = str(self.recipe), [(0, grouping_of(self.layouts))]
        return checkpoint.merge_state_dicts(
            checkpoint.write(recipe, self.num_steps, timeline, memory.state_dict(), rank, self.world_size)
            for rank, memory in enumerate(self.memories)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, or from the states of real ranks, merged; also of more or fewer ranks.

        Raises ValueError, and changes nothing, when an entry is missing, unknown or of another shape.
        """
        parameters = self.gradients(0)
        saved = [
            checkpoint.read(state, parameters, parameters, rank, self.world_size, self.recipe.reduction)
            for rank in range(self.world_size)
        ]
        for memory, own in zip(self.memories, saved, strict=True):
            memory.load_state_dict(own.memory, self._parameters[0].device)
        self.num_steps = saved[0].step

    def _average(self, group: Group) -> Traffic:
        scale = 1.0 if self.recipe.reduction == "sum" else 1 / group.size
        for layout, bucket in zip(self.layouts, self._buckets[group.rank], strict=True):
            context = Context(
                group,
                self._scratches[group.rank],
                scale,
                layout,
                self.memories[group.rank],
                self.num_steps,
            )
            self.recipe.exchange.run(bucket, context)
        return group.traffic

    def _show(self, rank: int) -> None:
        for parameter, view in zip(self._parameters, self._views[rank], strict=True):
            parameter.grad = view


def _bucketed(
    model: nn.Module, parameters: Sequence[nn.Parameter], bucket_cap_mb: float
) -> tuple[BucketLayout, ...]:
    """Parameters in the order given, in buckets of one dtype that a parameter may fill beyond the cap."""
    runs: list[list[nn.Parameter]] = []
    num_bytes = 0
    for parameter in parameters:
        if not runs or num_bytes >= bucket_cap_mb * 2**20 or runs[-1][0].dtype != parameter.dtype:
            runs.append([])
            num_bytes = 0
        runs[-1].append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
    layouts = Layouts(model)
    return tuple(layouts.of(cast("GradBucket", _Run(i, run))) for i, run in enumerate(runs))


class _Run:
    """Parameters of one bucket, in the form in which a reducer hands buckets out."""

    def __init__(self, index: int, parameters: list[nn.Parameter]) -> None:
        self._index, self._parameters = index, parameters

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffer(self) -> Tensor:
        return self._parameters[0].detach()

    def is_last(self) -> bool:
        return False
