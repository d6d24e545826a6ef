"""Check that memory stays flat and ranks stay the same, over thousands of steps with each recipe.

    python benchmarks/soak.py                                  all recipes, 10,000 steps each, two ranks
    python benchmarks/soak.py --recipes int4 sign --steps 2000 --json soak.json

A small model is trained on ranks of this machine, also with plain DDP ("DDP"), for comparison. Every
hundredth of the steps, each rank notes its resident memory, and ranks compare hashes of all parameters. The
slope is that of a line through the memory of the later four fifths of the run, on the rank where it is
steepest. Exit code 1 if ranks ever differ, a parameter is not finite, or memory grows by more than a page
(4 KiB) in a hundred steps.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom import Machine
from gradwire.testing import run_ranks, send_message

PLAIN = "DDP"  # without a wire, for the memory of torch itself
RECIPES = [PLAIN, *(name for name in gradwire.RECIPES if name != "noop")]  # its ranks differ
NUM_SAMPLES = 100
MAX_SLOPE = 4096 / 100  # bytes a step
_WARM_UP = NUM_SAMPLES // 5


@dataclass(frozen=True)
class Soak:
    """The figures of one recipe, over all ranks."""

    recipe: str
    num_steps: int
    seconds: float
    num_compared: int
    """Number of times that ranks compared their parameters."""
    num_different: int
    """Number of times that they differed or were not finite."""
    rss_mib: float
    """Resident memory of the largest rank at the end."""
    slope_bytes: float
    """Growth per step, on the rank where it is steepest."""

    @property
    def is_good(self) -> bool:
        return self.num_different == 0 and self.slope_bytes <= MAX_SLOPE

    def __str__(self) -> str:
        return (
            f"{self.recipe:16} {self.num_steps:7,} {self.seconds:6.0f} {self.num_compared:9} "
            f"{self.num_different:9} {self.rss_mib:8.0f} {self.slope_bytes:13.1f}"
            f"{'' if self.is_good else '  <- not good'}"
        )


def make_model() -> DistributedDataParallel:
    """Return a model of about 14,000 parameters of several shapes, all in one bucket."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 16))
    return DistributedDataParallel(net)


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def are_same(model: nn.Module) -> bool:
    """Return True if all ranks have the same parameters bit for bit, and all are finite."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.blake2b(flat.numpy().tobytes(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest, "little"), int(flat.isfinite().all())])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(each, mine) and bool(each[1]) for each in everyone)


def soak(rank: int, recipe: str, num_steps: int) -> tuple[list[int], int, float]:
    """Train on one rank; return its memory samples, the number of mismatches and the seconds."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    teacher = torch.randn(32, 16, generator=torch.Generator().manual_seed(9)) / 6
    period = max(num_steps // NUM_SAMPLES, 1)
    samples, num_different = [], 0
    begin = time.perf_counter()
    with contextlib.nullcontext() if recipe == PLAIN else gradwire.attach(model, recipe):
        for step in range(num_steps):
            x = torch.randn(8, 32, generator=generator)
            optimizer.zero_grad()
            (model(x) - x @ teacher).square().mean().backward()
            optimizer.step()
            if (step + 1) % period == 0:
                samples.append(rss_bytes())
                num_different += not are_same(model)
                if rank == 0:
                    send_message(period)
    return samples, num_different, time.perf_counter() - begin


def slope_of(samples: list[int], num_steps: int) -> float:
    """Return the growth in bytes per step: the least-squares slope of the samples after the warm-up."""
    later = samples[_WARM_UP:] if len(samples) > 2 * _WARM_UP else samples
    if len(later) < 2:
        return 0.0
    slope: float = statistics.linear_regression(range(len(later)), later).slope
    return slope / (num_steps / len(samples))


def run(recipe: str, num_steps: int, world_size: int, advance: Callable[[int], None]) -> Soak:
    results = run_ranks(
        soak,
        world_size,
        timeout=60 + 0.2 * num_steps,
        args=(recipe, num_steps),
        on_message=lambda _, period: advance(period),
    )
    return Soak(
        recipe,
        num_steps,
        max(seconds for _, _, seconds in results),
        num_compared=len(results[0][0]),
        num_different=max(different for _, different, _ in results),
        rss_mib=max(samples[-1] for samples, _, _ in results) / 2**20,
        slope_bytes=max(slope_of(samples, num_steps) for samples, _, _ in results),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--steps", type=int, default=10_000, help="for each recipe")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    try:
        recipes = [spec if spec == PLAIN else str(gradwire.recipe(spec)) for spec in options.recipes]
    except ValueError as error:
        parser.error(str(error))
    machine = Machine.here()
    print(
        f"{machine}; {options.world_size} ranks; torch {torch.__version__}; {datetime.now(timezone.utc):%F}"
    )
    print(
        f"{'':16} {'steps':>7} {'s':>6} {'compared':>9} {'different':>9} {'RSS MiB':>8} {'bytes a step':>13}"
    )
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    soaks: list[Soak] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for recipe in recipes:
            task = progress.add_task(recipe, total=options.steps)
            soaks.append(
                run(recipe, options.steps, options.world_size, functools.partial(progress.advance, task))
            )
            progress.remove_task(task)
            print(soaks[-1], flush=True)
            if options.json:  # written as rows finish
                record = {
                    "machine": dataclasses.asdict(machine),
                    "soaks": [dataclasses.asdict(s) for s in soaks],
                }
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(each.is_good for each in soaks) else 1


if __name__ == "__main__":
    sys.exit(main())
