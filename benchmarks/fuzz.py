"""Train random models in random ways by random recipes, and hold the results to the laws of averaging.

    python benchmarks/fuzz.py --cases 2000 --jobs 2        2000 cases, on 2 groups of ranks at a time
    python benchmarks/fuzz.py --minutes 8 --jobs 8         as many as run in 8 minutes
    python benchmarks/fuzz.py --seed 1 --only 17           one of them again

A case is drawn from the seed and its number: models (dtypes, shapes, strides, tied, frozen, unused, sparse,
lazily made), options of DistributedDataParallel, a recipe, 2 to 7 ranks, accumulation, uneven inputs,
compilation, another recipe or a resumed wire on the way. After each case, over all its steps:

- every rank has the same gradients, bit for bit;
- the sum of the averaged gradients, and of what ranks hold back, is the sum of the exact means, up to
  rounding;
- a parameter has a gradient if and only if it has one without gradwire;
- the wire has counted the steps.

The table at the end counts each case in the row of its recipe, and in that of every kind that it is of. It is
printed after a Ctrl-C or a SIGTERM too. Exits with 1 if a case was wrong.
"""

import argparse
import collections
import concurrent.futures
import itertools
import math
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from fuzz_checks import check_case
from fuzz_models import draw, kinds
from gradwire.headroom import Machine
from gradwire.ranks import time_limit
from gradwire.testing import RanksFailed, run_ranks, send_message

WORLD_SIZES = range(2, 8)
CASE_S = 60.0
# Enough that starting ranks costs little beside them.
CASES_OF_A_GROUP = 40
PROGRESS_S = 20.0


class Tally:
    """The cases that have run, by row of the table and number of ranks; counted on any thread."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_cases = 0
        self.num_wrong = 0
        self._begin = self._told = time.monotonic()
        self._lock = threading.Lock()
        self._cells: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        self._wrong: collections.Counter[str] = collections.Counter()

    def add(self, number: int, world_size: int) -> None:
        """Count a case that has run; show how far the campaign is, every now and then."""
        with self._lock:
            self.num_cases += 1
            for row in rows_of(self.seed, number, world_size):
                self._cells[row][world_size] += 1
            if time.monotonic() - self._told > PROGRESS_S:
                self._told = time.monotonic()
                print(self.summary(), flush=True)

    def fail(self, number: int, world_size: int, error: RanksFailed) -> None:
        """Note and show that a case was wrong."""
        ends = (" | ".join(text.strip().splitlines()[-2:])[:400] for text in error.errors.values())
        way, _ = draw(self.seed, number, world_size)
        print("\n  ".join([f"case {number}: {way}", *dict.fromkeys(ends)]), flush=True)
        with self._lock:
            self.num_wrong += 1
            self._wrong.update(rows_of(self.seed, number, world_size))

    def summary(self) -> str:
        """Return the counts of all cases in a line."""
        took_s = time.monotonic() - self._begin
        return f"seed {self.seed}: {self.num_cases} cases, {self.num_wrong} wrong; {took_s:.0f} s"

    def table(self) -> str:
        """Return the counts of each row, in Markdown."""
        lines = [" | ".join(["| cases of", *(f"{size} ranks" for size in WORLD_SIZES), "all", "wrong |"])]
        lines.append("|---|" + "---:|" * (len(WORLD_SIZES) + 2))
        for row, cells in sorted(self._cells.items(), key=lambda each: (each[0] != "all", each[0])):
            counts = [*(cells[size] for size in WORLD_SIZES), cells.total(), self._wrong[row]]
            lines.append(f"| {row} | " + " | ".join(map(str, counts)) + " |")
        return "\n".join(lines)


def rows_of(seed: int, number: int, world_size: int) -> list[str]:
    """Return the rows of the table that a case belongs to."""
    way, make = draw(seed, number, world_size)
    return ["all", f"`{way.family}`", *kinds(way, make())]


def run_cases(rank: int, seed: int, numbers: list[int], deadline: float) -> None:
    """Run these cases one after the other, up to a deadline; tell the parent of each that passes."""
    warnings.simplefilter("ignore")
    for number in numbers:
        late = torch.tensor(int(time.time() > deadline))
        dist.all_reduce(late)
        if late:
            return
        with time_limit(CASE_S):
            check_case(rank, seed, number)
        if rank == 0:
            send_message(number)


def run_group(tally: Tally, world_size: int, numbers: list[int], deadline: float) -> None:
    """Run cases on one group of ranks, and on another one after each failure."""
    left = collections.deque(numbers)

    def count(*_: object) -> None:
        tally.add(left.popleft(), world_size)

    while left and time.time() < deadline:
        args = (tally.seed, list(left), deadline)
        try:
            run_ranks(run_cases, world_size, CASE_S * len(left), args=args, on_message=count)
        except RanksFailed as error:
            failed = left[0] if left else numbers[-1]  # ranks may also fail while they exit
            if left:
                count()
            tally.fail(failed, world_size, error)
        else:
            return


def groups(numbers: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
    """Divide cases into groups for one number of ranks each: case n runs on 2 + n % 6 ranks."""
    numbers = iter(numbers)
    while chunk := list(itertools.islice(numbers, CASES_OF_A_GROUP * len(WORLD_SIZES))):
        for size in reversed(WORLD_SIZES):
            own = [number for number in chunk if WORLD_SIZES[number % len(WORLD_SIZES)] == size]
            if own:
                yield size, own


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, help="how many to run; 200, unless --minutes says how long")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="groups of ranks at a time")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run these cases")
    options = parser.parse_args()
    endless = options.cases is None and options.minutes < math.inf
    numbers = options.only or (itertools.count() if endless else range(options.cases or 200))
    deadline = time.time() + 60 * options.minutes
    tally, waiting, taking = Tally(options.seed), groups(numbers), threading.Lock()

    def run_groups() -> None:
        while time.time() < deadline:
            with taking:
                group = next(waiting, None)
            if group is None:
                return
            run_group(tally, *group, deadline)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ending = ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        pool = concurrent.futures.ThreadPoolExecutor(options.jobs)
        try:
            for run in [pool.submit(run_groups) for _ in range(options.jobs)]:
                run.result()
        except KeyboardInterrupt:
            ending = "; stopped early"
    print(f"\n{Machine.here()}; torch {torch.__version__}; {tally.summary()}{ending}\n\n{tally.table()}")
    return 1 if tally.num_wrong else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for ranks, which end with this process
