"""Cases that are checked on real ranks, one after the other, and the report on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradwire.ranks import RanksFailed, run_ranks, send_message, time_limit
from gradwire.torch_private import default_store


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case."""

    case: object
    """A `Case`, an `AveragerCase` or a `ShardedCase`."""
    error: str | None
    """The errors by rank; None if there were none."""
    deviation: float | None
    """The largest error of a parameter's gradient, in the units of ``tolerance``; None if the case failed."""


@dataclass(frozen=True)
class Report:
    """The outcomes of all cases; ``print`` it."""

    hook: str
    world_size: int
    results: tuple[CaseResult, ...]

    @property
    def ok(self) -> bool:
        return bool(self.results) and all(result.error is None for result in self.results)

    def __str__(self) -> str:
        num_ok = sum(result.error is None for result in self.results)
        lines = [f"{self.hook} on {self.world_size} ranks: {num_ok} of {len(self.results)} cases hold"]
        for result in self.results:
            if result.error is None:
                lines.append(f"  ok      {result.case}  (deviation {result.deviation:.1e})")
            else:
                lines.append(f"  BROKEN  {result.case}")
                lines += [f"          {line}" for line in result.error.splitlines()]
        return "\n".join(lines)


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless an argument has one of a few values."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def changes(case: object) -> str:
    """Return the fields of a case that differ from those of the base case, as text."""
    base = vars(type(case)())
    changed = {name: value for name, value in vars(case).items() if value != base[name]}
    return ", ".join(k if v is True else f"{k}={v}" for k, v in changed.items()) or "base"


def run_cases(
    check: Callable[..., float],
    cases: Sequence[object],
    world_size: int,
    case_timeout: float,
    args: tuple[Any, ...],
) -> tuple[CaseResult, ...]:
    """Run ``check(rank, case, *args)`` on ranks for each case; it raises, or returns the deviation.

    Cases share ranks; after one that breaks, the next get new ones.
    """
    results: list[CaseResult] = []
    while len(results) < len(cases):
        results += _run_until_broken(check, cases[len(results) :], world_size, case_timeout, args)
    return tuple(results)


def _run_until_broken(
    check: Callable[..., float],
    todo: Sequence[object],
    world_size: int,
    case_timeout: float,
    args: tuple[Any, ...],
) -> list[CaseResult]:
    """Run cases on one set of ranks, up to and including the first that breaks."""
    heard: list[dict[int, str | float]] = [{} for _ in todo]
    crash = ""

    def on_message(rank: int, message: tuple[int, str | float]) -> None:
        number, outcome = message
        heard[number][rank] = outcome

    try:
        run_ranks(
            _check_until_broken,
            world_size,
            case_timeout * len(todo),
            args=(check, todo, case_timeout, args),
            on_message=on_message,
        )
    except RanksFailed as error:
        crash = str(error)
    results: list[CaseResult] = []
    for case, outcomes in zip(todo, heard, strict=True):
        errors = {rank: text for rank, text in outcomes.items() if isinstance(text, str)}
        if errors:
            text = "\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items()))
            return [*results, CaseResult(case, text, None)]
        if len(outcomes) < world_size:
            return [*results, CaseResult(case, crash, None)]
        results.append(CaseResult(case, None, max(map(float, outcomes.values()))))
    return results


def _check_until_broken(
    rank: int,
    check: Callable[..., float],
    todo: Sequence[object],
    case_timeout: float,
    args: tuple[Any, ...],
) -> None:
    """Check cases inside a rank and report each, until one breaks on any rank."""
    store = default_store()
    for number, case in enumerate(todo):
        outcome: str | float
        try:
            with time_limit(case_timeout):
                outcome = check(rank, case, *args)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        send_message((number, outcome))
        store.set(f"outcome/{number}/{rank}", "broken" if isinstance(outcome, str) else "ok")
        keys = [f"outcome/{number}/{peer}" for peer in range(dist.get_world_size())]
        store.wait(keys, timedelta(seconds=case_timeout))
        if any(store.get(key) != b"ok" for key in keys):
            return
