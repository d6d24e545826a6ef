"""The invariants of the hook contract, as cases that any hook can be run through."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch.distributed as dist

from gradwire.recipes import Recipe
from gradwire.recipes import recipe as parse_recipe
from gradwire.testing.accuracy import Bounds
from gradwire.testing.case_runs import CaseResult, Report, changes, require_choice, run_cases
from gradwire.testing.expectations import Expect, Expectation, expectation_of
from gradwire.testing.invariants import Subject, check_invariants


@dataclass(frozen=True)
class Case:
    """One way to use DDP. The defaults are the base case; any other value is a step along one axis."""

    buckets: Literal["many", "one"] = "many"
    gradient_as_bucket_view: bool = False
    graph: Literal["dynamic", "static", "find_unused"] = "dynamic"
    no_sync: bool = False
    join: bool = False
    subgroup: bool = False
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    skew: bool = False
    """Ranks arrive at different times, over fifty steps."""
    nonfinite: bool = False
    """One rank's gradients are infinite in one step."""

    def __str__(self) -> str:
        return changes(self)


def cases(*, full: bool = False) -> list[Case]:
    """Return the base case and each axis on its own; with ``full``, the product of the axes.

    The product leaves out what DDP cannot combine.
    """
    base = Case()
    alone = [
        replace(base, dtype="float64"),
        replace(base, dtype="bfloat16"),
        replace(base, skew=True),
        replace(base, nonfinite=True),
    ]
    if full:
        product = itertools.product(
            ("many", "one"),
            (False, True),
            ("dynamic", "static", "find_unused"),
            (False, True),
            (False, True),
            (False, True),
        )
        combined = [Case(*values) for values in product]  # type: ignore[arg-type]
        # DDP's join() cannot shadow a static graph, nor steps that do not synchronise.
        return [c for c in combined if not (c.join and (c.graph == "static" or c.no_sync))] + alone
    return [
        base,
        replace(base, buckets="one"),
        replace(base, gradient_as_bucket_view=True),
        replace(base, graph="static"),
        replace(base, graph="find_unused"),
        replace(base, no_sync=True),
        replace(base, join=True),
        replace(base, subgroup=True),
        *alone,
    ]


def the_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the model's process group: the state of a hook by default."""
    return group


def check_hook(
    hook: str | Recipe | Callable[..., Any],
    state_factory: Callable[[dist.ProcessGroup], Any] = the_group,
    *,
    tolerance: float | None = None,
    world_size: int = 2,
    floor: float | None = None,
    feedback: bool | None = None,
    expect: Expect | None = None,
    num_roundings: int | None = None,
    via: Literal["ddp", "attach"] = "ddp",
    device: Literal["cpu", "cuda"] = "cpu",
    cases: Sequence[Case] | None = None,
    case_timeout: float = 60.0,
) -> Report:
    """Run a hook through every case of the contract, and report case by case.

    After each step of each case, these must hold on every rank:

    - Gradients are finite, and within ``tolerance`` of the exact average of the ranks' own gradients.
    - They are the same on all ranks bit for bit. A parameter that no rank has used has none.
    - Recipes and hooks with feedback: the whole result is neither too large nor too small. The factor that
      brings it closest to what the step has to send is between 0.71 and 1.41.
    - Recipes with feedback: what is sent and what is held back add up to what was there.
    - The global random generator is where it was.

    A step with an infinite gradient must show that on all ranks. The next step must be right again.

    Args:
        hook: a hook function that can be imported, or a recipe of gradwire's.
        state_factory: makes the hook's state from the model's process group; an importable function.
        tolerance: the largest error of a parameter's gradient, relative to its largest value, or to ``floor``
            times the model's largest if that is more. The default is 1e-5; for a recipe, it follows from the
            encoding. Roundings are allowed on top of it.
        world_size: number of ranks.
        floor: 0.01 by default; 1 for encodings that share a scale among parameters, as recipes do.
        feedback: True for hooks that send later what they leave out. Sums over all steps so far are then
            compared, not single steps, with errors relative to ``floor`` times the largest gradient of any
            step. The default is False; a recipe knows it.
        expect: what the hook should make of the ranks' gradients: ``"mean"`` by default, ``"sum"``, or
            ``"local"`` for hooks that do not communicate. A recipe knows it.
        num_roundings: how many times a result is rounded to the gradients' dtype. The default is
            ``world_size``, for a division and a sum in that dtype. It is 1 for recipes, which sum in fp32.
        via: register a hook with DDP itself, or through `gradwire.attach`. Recipes are always attached.
        device: ``"cuda"`` runs the model on the GPUs of this machine, over NCCL. Ranks may share one.
        cases: the cases to run; by default `cases()`.
        case_timeout: seconds after which a case counts as hung.

    Raises ValueError for an unknown recipe or choice, and for a hook that cannot be imported. Also without a
    tolerance for a recipe whose errors depend on the gradients (low rank, ``sign`` with feedback).

    Example::

        report = check_hook(my_hook, tolerance=1e-2, world_size=4)
        assert report.ok, report
    """
    if isinstance(hook, str):
        hook = parse_recipe(hook)
    own = expectation_of(hook, world_size) if isinstance(hook, Recipe) else Expectation()
    expect = own.expect if expect is None else expect
    require_choice("expect", expect, get_args(Expect))
    require_choice("via", via, ("ddp", "attach"))
    require_choice("device", device, ("cpu", "cuda"))
    feedback = own.feedback if feedback is None else feedback
    if num_roundings is None:
        num_roundings = 1 if isinstance(hook, Recipe) else world_size
    bounds = Bounds(
        tolerance=own.tolerance_or(tolerance, str(hook)),
        floor=own.floor if floor is None else floor,
        feedback=feedback,
        num_roundings=num_roundings,
        residual_unit=own.residual_unit,
        unbiased=own.unbiased,
        momentum=own.momentum,
        keeps_size=feedback or isinstance(hook, Recipe),
    )
    subject = Subject(hook, state_factory, expect, via, device, bounds)
    todo = _default_cases() if cases is None else cases
    results = run_cases(_check, todo, world_size, case_timeout, (subject,))
    return Report(subject.name, world_size, tuple(_with_advice(result, via) for result in results))


def _check(rank: int, case: Case, subject: Subject) -> float:
    return check_invariants(subject, case)


_default_cases = cases


# What torch says, or how it ends, when a hook does not return a Future of a tensor.
_UNCLEAR = ("signal SIG", "INTERNAL ASSERT", "Unable to cast")
_NO_FUTURE = (
    "DDP itself ends so if a hook returns no Future of a tensor; via='attach' says what the hook returned"
)


def _with_advice(result: CaseResult, via: str) -> CaseResult:
    """Add advice to an error that does not give its reason."""
    error = result.error or ""
    if via != "ddp" or not any(sign in error for sign in _UNCLEAR):
        return result
    return replace(result, error=f"{error}\n{_NO_FUTURE}")
