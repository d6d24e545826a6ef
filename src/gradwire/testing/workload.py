"""The model and the data that `check_hook` trains with, and the exact averages of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.testing.accuracy import Average
from gradwire.testing.expectations import Expect
from gradwire.testing.values import exact_averages

if TYPE_CHECKING:
    from gradwire.testing.matrix import Case

NONFINITE_STEP = 3
# Step 0 runs before DDP rebuilds its buckets; with a static graph it does so after step 1.
_NUM_STEPS = 6
_NUM_SKEWED_STEPS = 50
_NUM_MICRO_BATCHES = 3


class Net(nn.Module):
    """A small model with the kinds of parameters that hooks stumble over."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(72, 37)
        self.shared = nn.Linear(37, 37)
        self.sometimes = nn.Linear(37, 37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 37))
        self.silent = nn.Linear(37, 3)  # its gradient is zero
        self.head = nn.Linear(37, 3)

    def forward(self, images: Tensor, use_sometimes: bool) -> Tensor:
        x = self.conv(images).relu().flatten(1)
        x = self.first(x).tanh()
        x = self.shared(self.shared(x)).tanh()
        if use_sometimes:
            x = x + self.sometimes(x)
        x = self.frozen(x) * self.gain + self.empty.sum()
        output: Tensor = self.head(x) + 0 * self.silent(x)
        return output


@dataclass(frozen=True)
class TrainingBatch:
    """The data of one rank in one step."""

    images: list[Tensor]
    """One tensor per micro-batch."""
    use_sometimes: bool
    factor: float
    """The loss is multiplied by it."""

    def losses(self, model: Any) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch."""
        for images in self.images:
            yield model(images, self.use_sometimes).square().mean() * self.factor


def num_steps(case: Case, size: int) -> int:
    """Return the number of steps that the rank with the most data makes."""
    return _num_batches(case, size - 1, size)


def make_batches(case: Case, rank: int, size: int, device: torch.device) -> list[TrainingBatch]:
    """Make the batches of one rank of the model's group.

    Losses change their sign from step to step, so that the gradients of one step point away from those of
    the step before: a result that is a step late is far off.
    """
    # The rank in the world, so that subgroups have different data.
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = []
    for step in range(_num_batches(case, rank, size)):
        # DDP learns a static graph in its first backward pass, and requires that this one synchronises.
        accumulates = case.no_sync and not (case.graph == "static" and step == 0)
        images = [
            torch.randn(4, 3, 5, 5, generator=generator)
            .to(device, getattr(torch, case.dtype))
            .to(memory_format=torch.channels_last)
            for _ in range(_NUM_MICRO_BATCHES if accumulates else 1)
        ]
        # In turn: used by all ranks, by none, by the first.
        turn = step % 3 if case.graph == "find_unused" else 0
        use_sometimes = turn == 0 or (turn == 2 and rank == 0)
        infinite = case.nonfinite and step == NONFINITE_STEP and rank == size - 1
        batches.append(TrainingBatch(images, use_sometimes, float("inf") if infinite else (-1.0) ** step))
    return batches


def exact_results(
    net: nn.Module, batches: list[TrainingBatch], num_steps: int, expect: Expect, group: dist.ProcessGroup
) -> list[Average]:
    """Return the exact result of each step, found without DDP and in fp64. Collective."""
    local = copy.deepcopy(net)
    named = dict(local.named_parameters())
    steps, used = [], torch.zeros(num_steps, len(named))
    for step in range(num_steps):
        local.zero_grad()
        for loss in batches[step].losses(local) if step < len(batches) else ():
            loss.backward()
        steps.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()})
        used[step] = torch.tensor([p.grad is not None for p in named.values()])
    # DDP leaves a gradient None only if no rank has used the parameter.
    dist.all_reduce(used, group=group)
    is_used = [dict(zip(named, row, strict=True)) for row in used.bool().tolist()]
    return [
        replace(exact, values={n: value if of_step[n] else None for n, value in exact.values.items()})
        for exact, of_step in zip(exact_averages(steps, expect, group), is_used, strict=True)
    ]


def _num_batches(case: Case, rank: int, size: int) -> int:
    num_steps = _NUM_SKEWED_STEPS if case.skew else _NUM_STEPS
    return num_steps + int(case.join and rank == size - 1)
