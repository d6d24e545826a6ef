"""How far averages are from exact ones, parameter by parameter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.buckets import BucketLayout, Memory
from gradwire.exchanges import PLAIN, Context, Scratch
from gradwire.lanes import Lane, Run, Task, report_nothing
from gradwire.ops import Scale
from gradwire.peers import Group
from gradwire.telemetry.stats import ParameterStats

ScaleOf = Callable[[Tensor, Group], Scale]
"""What the sum over ranks of a bucket is multiplied with."""


class Meter:
    """Compares the averages of every n-th step with uncompressed ones, of a second exchange."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._step = -1
        self._found: list[tuple[BucketLayout, Tensor]] = []

    def is_due(self, step: int) -> bool:
        """Whether this step is compared."""
        return step % self._every == 0

    def submit(
        self, lane: Lane, task: Task, layout: BucketLayout, memory: Memory, scale_of: ScaleOf
    ) -> Future[Tensor]:
        """Run a bucket's task between an exact exchange and a comparison, which its figures leave out."""
        if self._step != task.place.step:
            self._step = task.place.step
            self._found.clear()
        task = replace(task, overlaps=False)
        comparison = _Comparison(layout, memory, scale_of, self._found)
        lane.submit(replace(task, run=comparison.average_exactly, report=report_nothing))
        lane.submit(replace(task, run=functools.partial(comparison.average, task.run)))
        return lane.submit(replace(task, run=comparison.compare, report=report_nothing))

    def read(self) -> tuple[ParameterStats, ...]:
        """What the last step that was compared gave; on CUDA, waits for it."""
        return tuple(
            _stats(slot.name, row)
            for layout, rows in self._found
            for slot, row in zip(layout.slots, rows.tolist(), strict=True)
        )


class _Comparison:
    """One bucket in one step; a lane runs the three in order."""

    def __init__(
        self,
        layout: BucketLayout,
        memory: Memory,
        scale_of: ScaleOf,
        found: list[tuple[BucketLayout, Tensor]],
    ) -> None:
        self._layout = layout
        self._memory = memory
        self._scale_of = scale_of
        self._found = found
        self._exact: Tensor | None = None
        self._result: Tensor | None = None

    def average_exactly(self, flat: Tensor, group: Group, scratch: Scratch) -> Tensor:
        exact = flat.clone()
        # Without the wire's memory: what is held back is no part of this step's mean.
        PLAIN.run(exact, Context(group, scratch, self._scale_of(flat, group), self._layout))
        self._exact = exact
        return flat

    def average(self, run: Run, flat: Tensor, group: Group, scratch: Scratch) -> Tensor:
        self._result = run(flat, group, scratch)
        return self._result

    def compare(self, flat: Tensor, group: Group, scratch: Scratch) -> Tensor:
        if self._exact is None or self._result is None:  # the exchange has failed
            return flat
        exact, result = self._layout.views(self._exact), self._layout.views(self._result)
        residuals = self._memory.named().get("residual", {})
        rows = [_products(exact[name], result[name], residuals.get(name)) for name in exact]
        self._found.append((self._layout, torch.stack(rows)))
        return self._result


def _products(exact: Tensor, result: Tensor, residual: Tensor | None) -> Tensor:
    """Squares of the exact mean, of the result, of their difference and of the residual; their product."""
    wide, other = _wide(exact), _wide(result)
    difference, held = other - wide, None if residual is None else _wide(residual)
    squares = [value.square().sum() for value in (wide, other, difference)]
    nothing = torch.full_like(squares[0], math.nan)
    return torch.stack([*squares, nothing if held is None else held.square().sum(), (wide * other).sum()])


def _wide(values: Tensor) -> Tensor:
    """In fp64, whose squares do not overflow."""
    return (torch.view_as_real(values) if values.is_complex() else values).double()


def _stats(name: str, row: list[float]) -> ParameterStats:
    exact, result, difference, held, product = row
    return ParameterStats(
        name=name,
        gradient_norm=_known(math.sqrt(exact)),
        relative_error=_ratio(math.sqrt(difference), math.sqrt(exact)),
        cosine=_ratio(product, math.sqrt(exact) * math.sqrt(result)),
        residual_norm=_known(math.sqrt(held)),
    )


def _ratio(value: float, base: float) -> float | None:
    return _known(value / base) if base else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
