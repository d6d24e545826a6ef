"""Values that ranks average in checks, and the exact averages of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.testing.accuracy import Average, Values
from gradwire.testing.expectations import Expect


def draw_values(shapes: Mapping[str, Sequence[int]], rank: int, step: int) -> Values:
    """Return one rank's values of one step, by name.

    All ranks have nearly the same values, so that their mean is as large as they are. The sign changes from
    step to step, so that a result that is a step late is far off.
    """
    common, own = torch.Generator().manual_seed(step), torch.Generator().manual_seed(1000 * step + rank + 1)
    drawn = {}
    for name, shape in shapes.items():
        size = 1 + torch.rand(tuple(shape), generator=common) + 0.5 * torch.rand(tuple(shape), generator=own)
        signs = 1.0 - 2.0 * (torch.arange(size.numel()) % 2).view(size.shape)
        drawn[name] = (-1.0) ** step * signs * size
    return drawn


def exact_averages(
    steps: Sequence[Mapping[str, Tensor]], expect: Expect, group: dist.ProcessGroup
) -> list[Average]:
    """Return what ranks should have after each step, in fp64, from this rank's own values; collective.

    All steps have values of the same names and shapes. For all of them, ranks exchange one message.
    """
    shapes = {name: value.shape for name, value in steps[0].items()}
    rows = [torch.cat([step[name].cpu().double().flatten() for name in shapes]) for step in steps]
    own = torch.stack(rows)
    total = torch.stack([own, own.abs()], dim=1)
    if expect != "local":
        dist.all_reduce(total, group=group)
    if expect == "mean":
        total /= group.size()
    sizes = [shape.numel() for shape in shapes.values()]

    def by_name(flat: Tensor) -> Values:
        parts = zip(shapes.items(), flat.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    return [Average({**by_name(values)}, by_name(magnitudes)) for values, magnitudes in total]
