"""The invariants of an `Averager`, checked on real ranks."""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.loops import Averager
from gradwire.recipes import Recipe
from gradwire.recipes import recipe as parse_recipe
from gradwire.testing.accuracy import Accuracy, Bounds, Gradients, Values, require, with_momentum
from gradwire.testing.case_runs import Report, changes, require_choice, run_cases
from gradwire.testing.expectations import Expect, expectation_of
from gradwire.testing.invariants import (
    average_values,
    device_of_rank,
    groups_of_rank,
    require_identical,
    values_of,
)
from gradwire.testing.values import draw_values, exact_averages

_SHAPES = {"conv": (8, 3, 3, 3), "weight": (37, 41), "bias": (37,), "gain": (), "empty": (0, 37)}
_NUM_STEPS = 6
_NUM_SKEWED_STEPS = 20
_RESUMED_AT = 3


@dataclass(frozen=True)
class AveragerCase:
    """One way to use an `Averager`. The defaults are the base case."""

    form: Literal["dict", "list", "handles"] = "dict"
    """Average all tensors at once by name, without names, or each by a handle of its own."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    subgroup: bool = False
    skew: bool = False
    """Ranks arrive at different times, over twenty steps."""
    resume: bool = False
    """Half of the steps are averaged again, by another averager that has loaded the state."""

    def __str__(self) -> str:
        return changes(self)


_CASES = (
    AveragerCase(),
    AveragerCase(form="list"),
    AveragerCase(form="handles"),
    AveragerCase(dtype="float64"),
    AveragerCase(dtype="bfloat16"),
    AveragerCase(subgroup=True),
    AveragerCase(skew=True),
    AveragerCase(resume=True),
)


def check_averager(
    recipe: str | Recipe,
    *,
    tolerance: float | None = None,
    world_size: int = 2,
    device: Literal["cpu", "cuda"] = "cpu",
    kind: type[Averager] = Averager,
    case_timeout: float = 60.0,
) -> Report:
    """Run an `Averager` with ``recipe`` through every way of use, and report case by case.

    After each call, tensors must be finite, within the recipe's bound of the exact mean, and the same on all
    ranks bit for bit. With feedback, what a call leaves out must stand in the residuals. A resumed run must
    have the bits of one that was not stopped. In one case, ranks arrive at different times.

    Args:
        recipe: a recipe, or its text.
        tolerance: the largest error, as in `check_hook`. By default it follows from the recipe.
        world_size: the number of ranks.
        device: ``"cuda"`` averages on the GPUs of this machine, over NCCL. Ranks may share one.
        kind: a class derived from `Averager`, to check that one; it must be importable.
        case_timeout: seconds after which a case counts as hung.

    Raises ValueError for an unknown recipe, and without a tolerance for a recipe whose errors depend on the
    tensors (low rank, ``sign`` with feedback).

    Example::

        report = check_averager("int4", world_size=3)
        assert report.ok, report
    """
    chosen = parse_recipe(recipe)
    require_choice("device", device, ("cpu", "cuda"))
    own = expectation_of(chosen, world_size)
    bounds = Bounds(
        tolerance=own.tolerance_or(tolerance, str(chosen)),
        floor=own.floor,
        feedback=own.feedback,
        num_roundings=1,
        residual_unit=own.residual_unit,
        unbiased=own.unbiased,
        momentum=own.momentum,
        keeps_size=True,
    )
    args = kind, chosen, bounds, device
    results = run_cases(_check, _CASES, world_size, case_timeout, args)
    return Report(f"{kind.__name__}({str(chosen)!r})", world_size, results)


def _check(
    rank: int, case: AveragerCase, kind: type[Averager], recipe: Recipe, bounds: Bounds, device_type: str
) -> float:
    """Average in the way of ``case``, inside a rank, and return the largest deviation."""
    device = device_of_rank(device_type)
    group, checks = groups_of_rank(case.subgroup, device)
    num_steps = _NUM_SKEWED_STEPS if case.skew else _NUM_STEPS
    draw = functools.partial(_draw, rank, getattr(torch, case.dtype), device)
    expect: Expect = "local" if not recipe.exchange.communicates else recipe.reduction
    results: list[Gradients] = []
    residuals: list[Values] = []
    velocities: list[Values] = []
    pauses = random.Random(rank)
    with kind(recipe, group, device=device) as averager:
        for step in range(num_steps):
            if case.skew:
                time.sleep(pauses.random() * 0.01)
            if case.resume and step == _RESUMED_AT:
                state = averager.state_dict()
            tensors = draw(step)
            _average(averager, tensors, case.form)
            results.append({name: tensor.cpu() for name, tensor in tensors.items()})
            for found, name in ((residuals, "residual"), (velocities, "velocity")):
                found.append(_named(values_of(averager.state_dict(), name), case.form))
    held = []
    if bounds.residual_unit is not None:
        held = average_values(residuals, draw(0), expect, checks)
    accuracy = Accuracy(bounds, getattr(torch, case.dtype), group.size())
    expected = exact_averages([draw(step) for step in range(num_steps)], expect, checks)
    if bounds.momentum:
        before = average_values(velocities, draw(0), expect, checks)
        expected = [with_momentum(*pair, bounds.momentum) for pair in zip(expected, before, strict=False)]
    for step, have in enumerate(results):
        around = (held[step], held[step + 1]) if held else None
        accuracy.check(f"step {step}", have, expected[step], around)
    if expect != "local":
        require_identical(results, checks)
    if case.resume:
        with kind(recipe, group, device=device) as averager:
            averager.load_state_dict(state)
            for step in range(_RESUMED_AT, num_steps):
                tensors = draw(step)
                _average(averager, tensors, case.form)
                for name, tensor in tensors.items():
                    is_same = torch.equal(tensor.cpu(), _present(results[step], name))
                    require(is_same, f"step {step}: {name} is not what a run without a stop has")
    return accuracy.deviation


def _draw(rank: int, dtype: torch.dtype, device: torch.device, step: int) -> dict[str, Tensor]:
    """Return one rank's tensors of one step."""
    drawn = draw_values(_SHAPES, rank, step)
    tensors = {name: values.to(device, dtype) for name, values in drawn.items()}
    tensors["conv"] = tensors["conv"].to(memory_format=torch.channels_last)
    return tensors


def _average(averager: Averager, tensors: dict[str, Tensor], form: str) -> None:
    if form == "handles":
        handles = [averager.start({name: tensor}) for name, tensor in tensors.items()]
        for handle in handles:
            handle.wait()
    else:
        averager.average_(tensors if form == "dict" else list(tensors.values()))


def _named(states: Values, form: str) -> Values:
    """Return states by the names of tensors; those of a list are numbered."""
    names = list(_SHAPES)
    return {names[int(name)] if form == "list" else name: value for name, value in states.items()}


def _present(result: Gradients, name: str) -> Tensor:
    found = result[name]
    assert found is not None
    return found
