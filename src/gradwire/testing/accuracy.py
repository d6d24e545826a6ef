"""Checks of a hook's results against exact averages, step by step.

Note [An octave for the size]: let x be the mean that a step has to send. That is the mean of its gradients,
and with feedback also of what earlier steps have left out. The factor ``<h, x> / <h, h>`` is the one by which
a result h comes closest to x. It is 1 if h is a projection of x, as low rank makes it, or the signs of x
times their mean magnitude. It is near 1 if errors are small. It must lie in the octave from 1/sqrt(2) to
sqrt(2). So of h, h/2 and 2h at most one passes, and 0 and -h never do. The relative error is then below 1,
since ``|h - x|^2 = |x|^2 - (2 * factor - 1) * |h|^2``. On 2 to 4 ranks, recipes have factors of 0.92 to 1.24.

A recipe whose errors are zero on average adds noise to x, so its h is longer than x, and the factor smaller.
For it, the factor is ``<h, x> / <x, x>``, which noise does not change on average. Of h, h/2 and 2h again at
most one passes, and 0 and -h never do.

Note [Nothing is lost]: with feedback, a step sends what it does not hold back. What ranks held back before it
and the mean of its gradients are, together, its result and what ranks hold back after it. This holds up to
rounding, however little of a gradient a recipe sends.

Note [Nothing of a velocity is lost]: with momentum, the same holds of velocities. In place of a step's
gradients there are these gradients plus the momentum times the velocities that ranks had before the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = dict[str, Tensor | None]
Values = dict[str, Tensor]

_LEAST_FACTOR, _LARGEST_FACTOR = math.sqrt(0.5), math.sqrt(2.0)
# Roundings to fp32 between gradients, result and residual, besides one for each rank in a sum: adding the
# residual, scaling, decoding or a product of factors of up to 32 columns, and subtracting. On CPU, the errors
# of the recipes in tests/rows.py are as large as those of two roundings.
_NUM_FP32_ROUNDINGS = 64
_FP32_UNIT = 2.0**-24


@dataclass(frozen=True)
class Average:
    """An average over ranks, exact in fp64, by parameter."""

    values: Gradients
    """None where no rank has used the parameter."""
    magnitudes: Values
    """The same average of magnitudes. Rounding errors of sums are relative to these."""

    @property
    def largest_magnitude(self) -> float:
        return max(float(each.max()) for each in self.magnitudes.values() if each.numel())


@dataclass(frozen=True)
class Bounds:
    """Limits for the errors of results, see `check_hook`."""

    tolerance: float
    floor: float
    feedback: bool
    num_roundings: int
    """Number of roundings to the bucket's dtype between the gradients and the result."""
    residual_unit: float | None
    """The relative error of rounding to the residuals' dtype.

    None if results are not held to Note [Nothing is lost].
    """
    keeps_size: bool
    """True if results are held to Note [An octave for the size]."""
    unbiased: bool = False
    """True if errors are zero on average, however large they are."""
    momentum: float = 0.0
    """The momentum of Note [Nothing of a velocity is lost]."""


class Accuracy:
    """The errors of one training run. Feed it step by step."""

    def __init__(self, bounds: Bounds, dtype: torch.dtype, num_ranks: int) -> None:
        self.deviation = 0.0
        """The largest error of a parameter's gradient so far, as `CaseResult` has it."""
        self._bounds = bounds
        self._unit = torch.finfo(dtype).eps / 2
        self._num_ranks = num_ranks
        self._largest = 0.0
        self._knows_missing = True
        self._sent: Values = {}
        self._exact: Values = {}

    def check(
        self, where: str, gradients: Gradients, exact: Average, held: tuple[Average, Average] | None
    ) -> None:
        """Check one step. Raises AssertionError.

        Args:
            where: names the step in errors.
            gradients: its result.
            exact: what the result should be.
            held: what ranks hold back before and after the step; None if that is not known.
        """
        result, mean = _present(where, gradients, exact.values)
        largest = max(float(value.abs().max()) for value in mean.values())
        self._largest = max(self._largest, largest)
        missing = {name: self._exact[name] - self._sent[name] for name in self._exact}
        if self._bounds.feedback:
            _add(self._exact, mean)
            _add(self._sent, result)
        if self._bounds.keeps_size and (held is not None or self._knows_missing):
            before = missing if held is None else held[0].values
            target = {name: _sum(mean[name], before.get(name)) for name in mean}
            _check_size(where, result, target, self._bounds.unbiased)
        if held is not None and self._bounds.residual_unit is not None:
            self._check_nothing_is_lost(where, result, exact, held, self._bounds.residual_unit)
        if self._bounds.feedback:
            # With feedback only sums over steps are accurate: compare those, over the largest gradient.
            scales = dict.fromkeys(self._exact, self._bounds.floor * self._largest)
            result, mean = self._sent, self._exact
        else:
            scales = {n: max(float(v.abs().max()), self._bounds.floor * largest) for n, v in mean.items()}
        self._check_errors(where, result, mean, exact.magnitudes, scales)

    def skip(self) -> None:
        """Leave out a step whose gradients are not finite. It may lose what was held back."""
        self._knows_missing = not self._bounds.feedback

    def _check_errors(
        self, where: str, result: Values, exact: Values, magnitudes: Values, scales: dict[str, float]
    ) -> None:
        # The last rounding is relative to the result. Each one before it is relative to a partial sum, and
        # those are at most the sum of magnitudes (Higham, Accuracy and Stability, section 4.2).
        before = (self._bounds.num_roundings - 1) * self._unit
        for name, want in exact.items():
            rounding = self._unit + before / (1 - before) * float(magnitudes[name].max()) / scales[name]
            allowed = self._bounds.tolerance + rounding
            error = float((result[name] - want).abs().max()) / scales[name]
            require(
                error <= allowed,
                f"{where}: {name}.grad is off by {error:.3g} of its largest value, allowed {allowed:.3g}",
            )
            self.deviation = max(self.deviation, error)

    def _check_nothing_is_lost(
        self,
        where: str,
        result: Values,
        exact: Average,
        held: tuple[Average, Average],
        residual_unit: float,
    ) -> None:
        """Check Note [Nothing is lost]."""
        before, after = held
        largest = exact.largest_magnitude + max(each.largest_magnitude for each in held)
        rounding = (self._num_ranks + _NUM_FP32_ROUNDINGS) * _FP32_UNIT * largest
        rounding += residual_unit * after.largest_magnitude
        for name in before.values:
            there, left = _sum(exact.values[name], before.values[name]), after.values[name]
            sent = result.get(name, torch.zeros((), dtype=torch.float64))
            error = float((there - _sum(sent, left)).abs().max())
            allowed = rounding + self._unit * float(sent.abs().max())
            require(
                error <= allowed,
                f"{where}: {name}.grad and what is held back of it do not add up: {error:.3g} is missing, "
                f"allowed {allowed:.3g}",
            )


def with_momentum(exact: Average, velocity: Average, momentum: float) -> Average:
    """Return the average of new velocities, from that of gradients and of the velocities before."""

    def add(name: str, value: Tensor, velocities: Mapping[str, Tensor | None]) -> Tensor:
        before = velocities.get(name)
        return value if before is None else value + momentum * before

    values = {
        name: None if value is None else add(name, value, velocity.values)
        for name, value in exact.values.items()
    }
    magnitudes = {name: add(name, value, velocity.magnitudes) for name, value in exact.magnitudes.items()}
    return Average(values, magnitudes)


def _check_size(where: str, result: Values, target: Values, is_unbiased: bool) -> None:
    """Check Note [An octave for the size] for all parameters together."""
    square = sum(float(value.square().sum()) for value in (target if is_unbiased else result).values())
    product = sum(float((result[name] * value).sum()) for name, value in target.items())
    factor = product / square if square else math.inf
    meaning = (
        "the part of the exact ones in them is" if is_unbiased else "the factor to be closest to exact is"
    )
    require(
        _LEAST_FACTOR < factor < _LARGEST_FACTOR,
        f"{where}: gradients are of the wrong size or direction: {meaning} {factor:.3g}, "
        f"allowed {_LEAST_FACTOR:.3g} to {_LARGEST_FACTOR:.3g}",
    )


def require(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with a text unless a condition holds."""
    if not holds:
        raise AssertionError(otherwise)


def _present(where: str, gradients: Gradients, expected: Gradients) -> tuple[Values, Values]:
    """Return the result and the exact one, without empty gradients.

    Raises AssertionError if a gradient is missing, not None where no rank has used it, or not finite.
    """
    for name, want in expected.items():
        have = gradients[name]
        require(
            (want is None) == (have is None),
            f"{where}: {name}.grad is {'None' if have is None else 'a tensor'}, expected "
            f"{'None, since no rank used it' if want is None else 'a tensor'}",
        )
        if have is not None:
            require(bool(have.isfinite().all()), f"{where}: {name}.grad is not finite")
    return (
        {name: have.double() for name, have in gradients.items() if have is not None and have.numel()},
        {name: want for name, want in expected.items() if want is not None and want.numel()},
    )


def _add(totals: Values, values: Values) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value


def _sum(value: Tensor | None, other: Tensor | None) -> Tensor:
    """Add two values, of which one may be missing."""
    if value is None or other is None:
        found = other if value is None else value
        assert found is not None
        return found
    return value + other
