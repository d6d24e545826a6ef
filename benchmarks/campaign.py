"""The frame of a campaign: cases from a seed, on groups of ranks, and a table of what they had."""

import argparse
import collections
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gradwire.headroom import Machine
from gradwire.testing import CaseResult
from gradwire.testing.case_runs import run_cases

# Cases that share ranks: starting these takes seconds.
_NUM_PER_WORLD = 20


class Drawn(Protocol):
    """A case that was drawn from a seed and its number."""

    @property
    def number(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def traits(self) -> Sequence[str]:
        """Return what the table counts this case by."""
        ...


def run_campaign(
    description: str, draw: Callable[[int, int], Drawn], check: Callable[..., float], case_s: float
) -> int:
    """Run the cases that the command line asks for, each as ``check(rank, case)``; return an exit status."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="groups of ranks at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no group of ranks after so long")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run these cases")
    options = parser.parse_args()
    numbers = options.only or range(options.first, options.first + options.cases)
    waiting: dict[int, list[Drawn]] = collections.defaultdict(list)
    for number in numbers:
        case = draw(options.seed, number)
        waiting[case.world_size].append(case)
    groups = [
        cases[begin : begin + _NUM_PER_WORLD]
        for cases in waiting.values()
        for begin in range(0, len(cases), _NUM_PER_WORLD)
    ]
    begin = time.time()

    def run(cases: list[Drawn]) -> Sequence[CaseResult]:
        if time.time() - begin > options.seconds:
            return ()
        results = run_cases(check, cases, cases[0].world_size, case_s, ())
        for each in results:
            if each.error is not None:
                print(f"{each.case}\n{each.error[-3000:]}\n", flush=True)
        return results

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = [each for found in pool.map(run, groups) for each in found]
    num_wrong = _report(results)
    print(
        f"{Machine.here()}; torch {torch.__version__}; seed {options.seed}: {len(results)} cases, "
        f"{num_wrong} wrong; {time.time() - begin:.0f} s"
    )
    return 1 if num_wrong else 0


def _report(results: Sequence[CaseResult]) -> int:
    """Print how many cases had each trait, and how many of these were wrong; return the wrong ones."""
    total: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    for each in results:
        traits = each.case.traits()  # type: ignore[attr-defined]
        total.update(traits)
        if each.error is not None:
            wrong.update(traits)
    print(f"{'':32} {'cases':>6} {'wrong':>6}")
    for trait, count in sorted(total.items()):
        print(f"{trait:32} {count:6} {wrong[trait]:6}")
    return sum(each.error is not None for each in results)
