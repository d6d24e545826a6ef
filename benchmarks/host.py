"""The host's time in a step: until backward() returns, and within it in gradwire's hooks.

    python benchmarks/host.py --device cuda                          two NCCL ranks, which may share one GPU
    GRADWIRE_CUDA_GRAPHS=0 python benchmarks/host.py --device cuda   with every kernel begun by the host
    python benchmarks/host.py --device cuda --rows int8 --profile    the functions that hooks spend it in

A model of many small kernels is bound by the host, and hooks are Python. The time in hooks includes that of
the calls by which NCCL's messages begin.
"""

import argparse
import copy
import cProfile
import io
import pstats
import statistics
import time
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp.bridge import Bridge
from gradwire.testing import run_ranks
from groups import open_group, rank_environment
from steps import CPU, GPU, PEERS, print_table

ROWS = ["DDP", "torch noop", "noop", "int8", "int4", "int2", "sign", "powersgd"]
# Exchanges are recorded when they come for the third time, and DDP rebuilds its buckets after the first step.
NUM_WARM_UP = 6
LIMIT_S = 600.0
NUM_PROFILED = 12
"""Functions to print of a profile."""


class Stopwatch:
    """Adds up the time in hooks, or profiles them, which makes them slower."""

    def __init__(self, *, profiles: bool) -> None:
        self.seconds, self.num_calls = 0.0, 0
        self.profile = cProfile.Profile() if profiles else None

    def timed(self) -> AbstractContextManager[object]:
        """Return a patch of the bridge, which every hook of gradwire's crosses."""
        run = Bridge.run

        def timed_run(bridge: Bridge, bucket: Any) -> object:
            begin = time.perf_counter()
            try:
                return (
                    run(bridge, bucket) if self.profile is None else self.profile.runcall(run, bridge, bucket)
                )
            finally:
                self.seconds += time.perf_counter() - begin
                self.num_calls += 1

        return mock.patch.object(Bridge, "run", timed_run)

    def restart(self) -> None:
        """Forget what has been timed so far."""
        self.seconds, self.num_calls = 0.0, 0
        if self.profile is not None:
            self.profile.clear()

    def functions(self) -> str:
        """Return the functions in which hooks have spent most time of their own."""
        text = io.StringIO()
        if self.profile is not None and self.num_calls:
            pstats.Stats(self.profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(
                NUM_PROFILED
            )
        return text.getvalue()


def time_row(
    name: str, model: DistributedDataParallel, built: Any, num_steps: int, *, profiles: bool
) -> tuple[list[str], str]:
    """Return the cells of a row, and a profile of its hooks if it is asked for."""
    stopwatch, host_s = Stopwatch(profiles=profiles), []
    on_gpu = next(model.parameters()).is_cuda
    with stopwatch.timed():
        for step in range(NUM_WARM_UP + num_steps):
            if step == NUM_WARM_UP:
                stopwatch.restart()
            dist.barrier()
            begin = time.perf_counter()
            model.zero_grad()
            built.step_loss(model).backward()
            host_s.append(time.perf_counter() - begin)
            if on_gpu:
                torch.cuda.synchronize()
    host_ms = 1e3 * statistics.median(host_s[NUM_WARM_UP:])
    in_hooks = f"{1e3 * stopwatch.seconds / num_steps:.1f}" if stopwatch.num_calls else ""
    cells = [name if name in PEERS else f"`{name}`", f"{host_ms:.1f}", in_hooks]
    return cells, stopwatch.functions()


def job(
    rank: int, names: list[str], num_steps: int, device: str, profiles: bool
) -> list[tuple[list[str], str]]:
    group = open_group(rank, device)
    built = (GPU if device == "cuda" else CPU).build().to(torch.device(device))
    rows = []
    for name in names:
        model = DistributedDataParallel(copy.deepcopy(built.model), process_group=group)
        if name not in PEERS:
            gradwire.attach(model, name)
        elif PEERS[name] is not None:
            model.register_comm_hook(group, PEERS[name])
        rows.append(time_row(name, model, built, num_steps, profiles=profiles))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="recipes, and torch's hooks, as 'torch noop'")
    parser.add_argument("--steps", type=int, default=10, help="steps to measure")
    parser.add_argument("--profile", action="store_true", help="print the functions that hooks spend time in")
    options = parser.parse_args()
    arguments = options.rows, options.steps, options.device, options.profile
    with rank_environment(2, options.device) as environment:
        rows = run_ranks(job, 2, LIMIT_S, args=arguments, environment=environment)[0]
    print_table(["", "until backward() returns, ms", "of it in hooks, ms"], [cells for cells, _ in rows])
    for cells, functions in rows:
        if functions:
            print(f"\n{cells[0]}, {options.steps} steps:\n{functions.strip()}")


if __name__ == "__main__":
    main()
