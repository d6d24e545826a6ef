"""Comparison of averages with exact ones, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout, Memory
from gradwire.exchanges import PLAIN, Context, Scratch, average
from gradwire.lanes import Promise, Run, Task, report_nothing
from gradwire.ops import Scale
from gradwire.peers import Group
from gradwire.telemetry.stats import ParameterStats

ScaleOf = Callable[[torch.device, Group], Scale]
"""Return the factor of a bucket's sum over ranks."""


class Meter:
    """Compares the averages of every n-th step with exact ones, from a second, uncompressed exchange."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._step = -1
        self._rows: list[tuple[BucketLayout, Tensor]] = []

    def is_due(self, step: int) -> bool:
        """Return True if this step is compared."""
        return step % self._every == 0

    def measured(self, task: Task, layout: BucketLayout, memory: Memory, scale_of: ScaleOf) -> list[Task]:
        """Return three tasks: an exact exchange, the bucket's own task, and the comparison.

        Only the bucket's own task is reported, so that its figures are those of any other step.
        """
        if self._step != task.place.step:
            self._step = task.place.step
            self._rows.clear()
        comparison = _Comparison(layout, memory, scale_of, self._rows, task.run)
        (flat,) = task.flats
        task = replace(task, overlaps=False)
        return [
            replace(task, run=comparison.average_exactly, promises=(Promise(flat),), report=report_nothing),
            replace(task, run=comparison.average, promises=(Promise(flat),)),
            replace(task, run=comparison.compare, report=report_nothing),
        ]

    def read(self) -> tuple[ParameterStats, ...]:
        """Return the figures of the last step that was compared; on CUDA, wait for it."""
        return tuple(
            _stats(slot.name, row)
            for layout, rows in self._rows
            for slot, row in zip(layout.slots, rows.tolist(), strict=True)
        )


class _Comparison:
    """One bucket in one step; a lane runs its three methods in order."""

    def __init__(
        self,
        layout: BucketLayout,
        memory: Memory,
        scale_of: ScaleOf,
        all_rows: list[tuple[BucketLayout, Tensor]],
        run: Run,
    ) -> None:
        self._layout = layout
        self._memory = memory
        self._scale_of = scale_of
        self._all_rows = all_rows
        self._run = run
        self._exact: Tensor | None = None
        self._result: Tensor | None = None

    def average_exactly(self, flats: Sequence[Tensor], group: Group, scratch: Scratch) -> Sequence[Tensor]:
        exact = flats[0].clone()
        # Without the wire's memory: residuals are not part of this step's exact average.
        average(exact, PLAIN, Context(group, scratch, self._scale_of(exact.device, group), self._layout))
        self._exact = exact
        return flats

    def average(self, flats: Sequence[Tensor], group: Group, scratch: Scratch) -> Sequence[Tensor]:
        (self._result,) = self._run(flats, group, scratch)
        return [self._result]

    def compare(self, flats: Sequence[Tensor], group: Group, scratch: Scratch) -> Sequence[Tensor]:
        if self._exact is None or self._result is None:  # the exchange has failed
            return flats
        exact, result = self._layout.views(self._exact), self._layout.views(self._result)
        residuals = self._memory.named().get("residual", {})
        rows = [_products(exact[name], result[name], residuals.get(name)) for name in exact]
        self._all_rows.append((self._layout, torch.stack(rows)))
        return [self._result]


def _products(exact: Tensor, result: Tensor, residual: Tensor | None) -> Tensor:
    """Return sums over one parameter, in fp64.

    They are the squares of the exact average, the result, their difference and the residual, and the
    product of exact average and result. Without a residual, its square is NaN.
    """
    wide, other = _wide(exact), _wide(result)
    squares = [value.square().sum() for value in (wide, other, other - wide)]
    unknown = torch.full_like(squares[0], math.nan)
    residual_square = unknown if residual is None else _wide(residual).square().sum()
    return torch.stack([*squares, residual_square, (wide * other).sum()])


def _wide(values: Tensor) -> Tensor:
    """Return real values in fp64, whose squares do not overflow."""
    return (torch.view_as_real(values) if values.is_complex() else values).double()


def _stats(name: str, row: list[float]) -> ParameterStats:
    exact, result, difference, residual, product = row
    return ParameterStats(
        name=name,
        gradient_norm=_finite_or_none(math.sqrt(exact)),
        relative_error=_ratio(math.sqrt(difference), math.sqrt(exact)),
        cosine=_ratio(product, math.sqrt(exact) * math.sqrt(result)),
        residual_norm=_finite_or_none(math.sqrt(residual)),
    )


def _ratio(value: float, base: float) -> float | None:
    return _finite_or_none(value / base) if base else None


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
