"""Cases that are checked on real ranks, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire.ranks import RanksFailed, run_ranks, send_message, time_limit
from gradwire.testing.matrix import CaseResult


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
    heard: dict[int, list[float]] = {}
    crash = ""
    try:
        run_ranks(
            _check_all,
            world_size,
            case_timeout * len(todo),
            args=(check, todo, case_timeout, *args),
            on_message=lambda rank, message: heard.setdefault(message[0], []).append(message[1]),
        )
    except RanksFailed as error:
        crash = str(error)
    whole = [max(deviations) for _, deviations in sorted(heard.items()) if len(deviations) == world_size]
    results = [CaseResult(case, None, worst) for case, worst in zip(todo, whole, strict=False)]
    return [*results, CaseResult(todo[len(whole)], crash, None)] if crash else results


def _check_all(
    rank: int, check: Callable[..., float], todo: Sequence[object], case_timeout: float, *args: Any
) -> None:
    for number, case in enumerate(todo):
        with time_limit(case_timeout):
            send_message((number, check(rank, case, *args)))
