"""Average over many ranks on one machine: two-shot, over a grid, and torch's own all-reduce.

    python benchmarks/many_ranks.py --ranks 4 8 16 32

Prints, for each number of ranks and each size of a tensor: messages and bytes that a rank sends, the time of
one average (the slowest rank's, the median of several), the time to open an `Averager`, and the files and
threads of a rank while it is open. Ranks share this machine's cores: compare rows of one table only.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

import gradwire
from gradwire.headroom import Machine
from gradwire.testing import run_ranks

NUM_TIMES = 9
ALLREDUCE = "all-reduce"


@dataclass(frozen=True)
class Row:
    """The figures of one recipe on one rank."""

    open_s: float
    num_files: int
    num_threads: int
    messages: float
    bytes_sent: float
    seconds: list[float]


def grid_of(recipe: str, num_ranks: int) -> str:
    """Return the recipe over a grid that is as square as the number of ranks allows."""
    columns = next(c for c in range(math.isqrt(num_ranks), 0, -1) if num_ranks % c == 0)
    return f"{recipe}:local_size={columns},within=same"


def measure(rank: int, recipes: list[str], numels: list[int]) -> dict[tuple[str, int], Row]:
    torch.set_num_threads(1)
    found = {}
    for numel in numels:
        values = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        for recipe in recipes:
            found[recipe, numel] = measure_one(recipe, values)
    return found


def measure_one(recipe: str, values: torch.Tensor) -> Row:
    dist.barrier()
    begin = time.perf_counter()
    averager = None if recipe == ALLREDUCE else gradwire.Averager(recipe)
    if averager is not None:
        averager.average_(values.clone())  # connections open with the first average
    opened = time.perf_counter() - begin
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    seconds = []
    for _ in range(NUM_TIMES):
        copy = values.clone()
        dist.barrier()
        begin = time.perf_counter()
        if averager is None:
            dist.all_reduce(copy)
        else:
            averager.average_(copy)
        seconds.append(time.perf_counter() - begin)
    if averager is None:
        return Row(0.0, files, threads, math.nan, math.nan, seconds)
    stats = averager.stats()
    averager.close()
    num_calls = NUM_TIMES + 1
    messages, sent = (stats.num_messages or 0) / num_calls, (stats.bytes_sent or 0) / num_calls
    return Row(opened, files, threads, messages, sent, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--numels", type=int, nargs="+", default=[1 << 14, 1 << 18, 1 << 22])
    parser.add_argument("--recipes", nargs="+", default=["int8", "int4"])
    options = parser.parse_args()
    print(f"{Machine.here()}; Gloo on loopback, one thread a rank; torch {torch.__version__}")
    heads = ("ranks", "values", "recipe", "messages", "kB sent", "ms", "open s", "files", "threads")
    print("{:>5} {:>9} {:32} {:>8} {:>9} {:>9} {:>7} {:>6} {:>7}".format(*heads))
    for num_ranks in options.ranks:
        recipes = [ALLREDUCE]
        for name in options.recipes:
            recipes += [f"{name}:local_size=1", grid_of(name, num_ranks)]
        args = recipes, options.numels
        results = run_ranks(measure, num_ranks, 600, args=args)
        for recipe, numel in results[0]:
            rows = [result[recipe, numel] for result in results]
            slowest = [max(times) for times in zip(*(row.seconds for row in rows), strict=True)]
            first = rows[0]
            print(
                f"{num_ranks:5} {numel:9} {recipe:32} {first.messages:8.0f} {first.bytes_sent / 1e3:9.1f} "
                f"{1e3 * statistics.median(slowest):9.2f} {max(row.open_s for row in rows):7.2f} "
                f"{max(row.num_files for row in rows):6} {max(row.num_threads for row in rows):7}",
                flush=True,
            )


if __name__ == "__main__":
    main()
