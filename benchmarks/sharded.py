"""Times and memory of sharded training: torch's own against gradwire's, side by side in one run.

    python benchmarks/sharded.py scatter                     a reduce-scatter alone, two ranks
    python benchmarks/sharded.py scatter --link 1gbit        each rank behind a link (root, iproute2)
    python benchmarks/sharded.py scatter --device cuda --dtype bf16    two NCCL ranks, which may share one GPU
    python benchmarks/sharded.py step --link 100mbit         a step of FSDP2 on two hosts
    python benchmarks/sharded.py step --weights int8         the same, with parameters gathered by int8 too
    python benchmarks/sharded.py hsdp --link 100mbit         a step of HSDP, two hosts of two ranks each

Rows are measured in the same processes, in turns whose order changes from round to round. A ratio is the
median of the ratios within each round. A step is zero_grad, forward and backward; times are those of the
slowest rank. In noop gradients are not averaged, so no recipe is faster. Memory is the most that a rank has
used beyond what it had before the row: of its resident set, or of CUDA's allocator.
"""

import argparse
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.headroom import Machine, Workload
from gradwire.lab import Lab
from gradwire.testing import run_ranks

BASE = "torch"
RECIPES = {
    "scatter": ["fp32", "bf16", "int8", "int4"],
    "step": ["fp32", "bf16", "int8", "int4"],
    "hsdp": ["fp32", "int8", "int4", "sign", "powersgd", "powersgd:rank=4", "noop"],
}
NUM_RANKS = {"scatter": 2, "step": 2, "hsdp": 4}
CPU, GPU = Workload(), Workload(width=1024, num_layers=8, batch=8, sequence=128)
Row = tuple[list[float], float]
"""Milliseconds of every turn, and megabytes."""


def prepare(rank: int, device: str) -> dist.ProcessGroup:
    """Return the group of all ranks, for tensors on the device."""
    group = dist.group.WORLD
    if device == "cuda":
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(rank % torch.cuda.device_count())
        group = dist.new_group(backend="nccl")
    assert group is not None
    return group


def measure(ways: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, Row]:
    """Run all rows in turns; return the times of the slowest rank, and the most memory of any."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, float] = dict.fromkeys(ways, 0.0)
    for turn in range(1 + rounds):  # the first turn warms up
        for name, run in random.Random(turn).sample(list(ways.items()), len(ways)):
            dist.barrier()
            before = reset_peak(device)
            begin = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
            memory[name] = max(memory[name], (peak_bytes(device) - before) / 1e6)
    found = {}
    for name, values in seconds.items():
        times = torch.tensor([*values, memory[name]], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        found[name] = [1e3 * second for second in times[:-1].tolist()], float(times[-1])
    return found


def reset_peak(device: str) -> float:
    """Forget the largest use of memory so far, and return the present one."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.memory_allocated())
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def peak_bytes(device: str) -> float:
    return float(torch.cuda.max_memory_allocated()) if device == "cuda" else resident_bytes("VmHWM")


def resident_bytes(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return 1024.0 * int(line.split()[1])


def time_scatter(
    rank: int, names: list[str], rounds: int, device: str, dtype: torch.dtype, numel: int
) -> dict[str, Row]:
    """Time a reduce-scatter alone."""
    group = prepare(rank, device)
    flat = torch.randn(numel, device=device, dtype=dtype)
    shard = flat.new_empty(numel // group.size())

    def by_torch() -> None:
        dist.reduce_scatter_tensor(shard, flat, group=group)

    def by(averager: gradwire.Averager) -> Callable[[], None]:
        def run() -> None:
            averager.reduce_scatter(flat)

        return run

    ways = {BASE: by_torch, **{name: by(gradwire.Averager(name, group)) for name in names}}
    return measure(ways, rounds, device)


def time_steps(
    rank: int,
    names: list[str],
    rounds: int,
    device: str,
    is_hsdp: bool,
    weights: str | None,
    workload: Workload,
) -> dict[str, Row]:
    """Time steps of FSDP2 with parameters gathered twice and once, or of HSDP."""
    group = prepare(rank, device)
    built = workload.build().to(torch.device(device))
    if is_hsdp:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = DeviceMesh.from_group(group, device)

    def step(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            built.step_loss(model).backward()

        return run

    ways = {}
    rows: list[tuple[str, str | None]] = [(name, None) for name in (BASE, *names)]
    rows += [(name, weights) for name in names if weights is not None]
    for reshards in (True,) if is_hsdp else (True, False):
        for name, encoding in rows:
            torch.manual_seed(0)
            model: nn.Module = workload.model().to(device)
            for block in model.children():
                fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
            fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
            if name != BASE:
                gradwire.attach(model, name, weights=encoding)
            label = name if encoding is None else f"{name}, weights {encoding}"
            ways[label if is_hsdp or reshards else f"{label}, gathered once"] = step(model)
    ways["no exchange"] = step(workload.model().to(device))
    return measure(ways, rounds, device)


def report(what: str, rows: dict[str, Row]) -> None:
    print(f"\n{what:36} {'median':>8} {'min':>8} {'max':>8}   over torch's   torch's over it   MB at most")
    for name, (ms, memory) in rows.items():
        base = rows[f"{BASE}, gathered once" if name.endswith("once") else BASE][0]
        ratio = statistics.median(a / b for a, b in zip(ms, base, strict=True))
        times = f"{statistics.median(ms):8.1f} {min(ms):8.1f} {max(ms):8.1f}"
        print(f"{name:36} {times} {ratio:14.3f} {1 / ratio:17.2f} {memory:12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["scatter", "step", "hsdp"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--link", help="rate of each host's link, such as 1gbit; by default no limit")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", nargs="+", help="recipes")
    parser.add_argument("--mb", type=float, default=64.0, help="size of what is scattered")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16"], default="fp32", help="dtype of what is scattered"
    )
    parser.add_argument(
        "--batch", type=int, default=CPU.batch, help="sequences of 64 tokens per rank, on CPU"
    )
    parser.add_argument("--weights", help="an encoding: rows with encoded gathers of parameters too")
    options = parser.parse_args()
    names = options.rows or RECIPES[options.what]
    num_ranks, limit = NUM_RANKS[options.what], timedelta(minutes=20).total_seconds()
    link = f"links of {options.link}" if options.link else "no limit"
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{Machine.here()}, Gloo"
    print(f"{where}; {num_ranks} ranks, {link}; torch {torch.__version__}")
    with Lab(2, options.link) if options.link else contextlib.nullcontext() as lab:
        if options.what == "scatter":
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
            numel = int(options.mb * 1e6) // dtype.itemsize // num_ranks * num_ranks
            args = names, options.rounds, options.device, dtype, numel
            rows = run_ranks(time_scatter, num_ranks, limit, args=args, lab=lab)[0]
            report(f"{options.mb:g} MB of {options.dtype}, ms", rows)
        else:
            workload = replace(CPU, batch=options.batch) if options.device == "cpu" else GPU
            more = names, options.rounds, options.device, options.what == "hsdp", options.weights, workload
            rows = run_ranks(time_steps, num_ranks, limit, args=more, lab=lab)[0]
            report("a step, ms", rows)
            print(f"{workload}; parameters are {4 * workload.num_parameters / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
