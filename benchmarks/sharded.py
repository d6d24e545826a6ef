"""Times and memory of sharded training: torch's own against gradwire's, side by side in one run.

    python benchmarks/sharded.py scatter                     a reduce-scatter alone, two ranks
    python benchmarks/sharded.py scatter --link 1gbit        each rank behind a link (root, iproute2)
    python benchmarks/sharded.py scatter --device cuda --dtype bf16    two NCCL ranks, which may share one GPU
    python benchmarks/sharded.py step --link 100mbit         a step of FSDP2 on two hosts
    python benchmarks/sharded.py step --weights fp32         with parameters gathered by gradwire too
    python benchmarks/sharded.py memory --rounds 2           the same, slower, with exact figures of memory
    python benchmarks/sharded.py hsdp --link 100mbit         a step of HSDP, two hosts of two ranks each
    python benchmarks/sharded.py step --link 1gbit --plan    beside what `gradwire plan` predicts

Rows are measured in the same processes, in turns whose order changes from round to round. A ratio is the
median of the ratios within each round. A step is zero_grad, forward and backward; times are those of the
slowest rank. In noop gradients are not averaged, so no recipe is faster. With --link and --weights, "plain
sends" are the same bytes by Gloo alone, beside the same compute (`plain_sends.py`). Memory is the most that a
rank has used beyond what it had before the row: of its resident set, or of CUDA's allocator.
"""

import argparse
import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.headroom import ALLREDUCE, Machine, Sharding, Workload
from gradwire.lab import Lab, parse_rate
from gradwire.planner import Calibration, Cluster, ShardedPlan, calibrate, predict_sharded
from gradwire.testing import run_ranks
from groups import open_group, rank_environment
from plain_sends import PlainSends
from turns import ratio, shuffled

BASE, ALONE, ONCE, PLAIN = "torch", "no exchange", ", gathered once", "plain sends, "
RECIPES = {
    "scatter": ["fp32", "bf16", "int8", "int4"],
    "step": ["fp32", "bf16", "int8", "int4"],
    "memory": ["fp32", "bf16", "int8", "int4"],
    "hsdp": ["fp32", "int8", "int4", "sign", "powersgd", "powersgd:rank=4", "noop"],
}
LIMIT_S = 1200.0
NUM_RANKS = {"scatter": 2, "step": 2, "memory": 2, "hsdp": 4}
CPU, GPU = Workload(), Workload(width=1024, num_layers=8, batch=8, sequence=128)


@dataclass
class Row:
    """The figures of one way to run."""

    ms: list[float]
    """Times of every turn."""
    memory_mb: float
    bytes_sent: int | None = None
    """Bytes that a rank sends in a step, gradients and parameters; None if they are not known."""


def measure(ways: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, Row]:
    """Run all rows in turns; return the times of the slowest rank, and the most memory of any."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, float] = dict.fromkeys(ways, 0.0)
    for turn in range(1 + rounds):  # the first turn warms up
        for name, run in shuffled(ways, turn):
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
        found[name] = Row([1e3 * second for second in times[:-1].tolist()], float(times[-1]))
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
    group = open_group(rank, device)
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


@dataclass(frozen=True)
class Variant:
    """A way to train a sharded model."""

    recipe: str
    weights: str | None = None
    reshards: bool = True
    """True if parameters are gathered twice."""

    def __str__(self) -> str:
        weights = "" if self.weights is None else f", weights {self.weights}"
        return f"{self.recipe}{weights}{'' if self.reshards else ONCE}"


def variants(recipes: list[str], weights: list[str], reshards: list[bool]) -> list[Variant]:
    """Return torch's own way, and each recipe with parameters gathered by torch and by each encoding."""
    ways = [(BASE, None), *((recipe, each) for each in (None, *weights) for recipe in recipes)]
    return [Variant(*way, each) for each in reshards for way in ways]


def time_steps(
    rank: int,
    ways: list[Variant],
    rounds: int,
    device: str,
    is_hsdp: bool,
    workload: Workload,
    sends_plainly: bool,
) -> dict[str, Row]:
    """Time steps of FSDP2 or of HSDP, and of the model alone; with ``sends_plainly``, bytes by Gloo too."""
    group = open_group(rank, device)
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

    steps: dict[str, Callable[[], None]] = {}
    sent = {}
    for way in ways:
        torch.manual_seed(0)
        model: nn.Module = workload.model().to(device)
        for block in model.children():
            fully_shard(block, mesh=mesh, reshard_after_forward=way.reshards)
        fully_shard(model, mesh=mesh, reshard_after_forward=way.reshards)
        if way.recipe != BASE:
            plan = gradwire.attach(model, way.recipe, weights=way.weights).plan()
            sent[str(way)] = plan.bytes_sent + plan.bytes_gathered
            if sends_plainly and way.weights is not None:
                num_gathers = 2 if way.reshards else 1
                sends = PlainSends(workload.model(), plan.bytes_gathered, plan.bytes_sent, num_gathers)
                steps[f"{PLAIN}{way}"] = functools.partial(sends.step, built)
        steps[str(way)] = step(model)
    steps[ALONE] = step(workload.model().to(device))
    found = measure(steps, rounds, device)
    return {name: replace(row, bytes_sent=sent.get(name)) for name, row in found.items()}


def report(what: str, rows: dict[str, Row]) -> None:
    print(f"\n{what:44} {'median':>8} {'min':>8} {'max':>8}   over torch's   torch's over it   MB at most")
    for name, row in rows.items():
        base = rows.get(f"{BASE}{ONCE}" if name.endswith(ONCE) else BASE) or rows[f"{BASE}{ONCE}"]
        over = ratio(row.ms, base.ms)
        times = f"{statistics.median(row.ms):8.1f} {min(row.ms):8.1f} {max(row.ms):8.1f}"
        print(f"{name:44} {times} {over:14.3f} {1 / over:17.2f} {row.memory_mb:12.1f}")


def report_limits(rows: dict[str, Row], link: str) -> None:
    """Print steps beside their limits.

    These are the larger of computing alone and a rank's bytes at the link's rate, and plain sends.
    """
    alone = statistics.median(rows[ALONE].ms)
    print(f"\n{'limits of a step':36} {'MB sent':>8} {'limit':>8} {'median':>8}   over it   over plain sends")
    for name, row in rows.items():
        if row.bytes_sent is not None:
            limit, ms = max(alone, 8e3 * row.bytes_sent / parse_rate(link)), statistics.median(row.ms)
            plain = rows.get(f"{PLAIN}{name}")
            over = (
                "" if plain is None else f"{statistics.median(plain.ms):8.1f} {ratio(row.ms, plain.ms):9.2f}"
            )
            print(f"{name:36} {row.bytes_sent / 1e6:8.1f} {limit:8.1f} {ms:8.1f} {ms / limit:9.2f} {over}")


def report_plan(
    rows: dict[str, Row], ways: list[Variant], is_hsdp: bool, link: str, speeds: Calibration
) -> None:
    """Print steps beside those that ``gradwire plan --sharding`` predicts from computing alone."""
    num_local = 2 if is_hsdp else 1
    cores = Machine.here().num_cores / (2 * num_local)
    cluster = Cluster(2, num_local, parse_rate(link), latency_s=30e-6, cores_per_worker=cores)
    alone_s = statistics.median(rows[ALONE].ms) / 1e3
    print(f"\n{'predictions of a step, ms':36} {'measured':>8} {'predicted':>9}   error")
    for way in ways:
        plan = ShardedPlan(Sharding("hsdp" if is_hsdp else "fsdp", 2), way.weights, way.reshards)
        name = ALLREDUCE if way.recipe == BASE else way.recipe
        predicted = 1e3 * predict_sharded(name, CPU.model(), alone_s, cluster, speeds, plan).step_s
        ms = statistics.median(rows[str(way)].ms)
        print(f"{way!s:36} {ms:8.1f} {predicted:9.1f} {predicted / ms - 1:+7.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["scatter", "step", "hsdp", "memory"])
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
    parser.add_argument(
        "--weights", nargs="+", default=[], help="encodings: rows with gathers of parameters by these too"
    )
    parser.add_argument(
        "--gathered",
        nargs="+",
        choices=["twice", "once"],
        default=["twice", "once"],
        help="with step or memory: the number of times that parameters are gathered in a step",
    )
    parser.add_argument(
        "--plan", action="store_true", help="with --link and step or hsdp: predictions beside measurements"
    )
    options = parser.parse_args()
    names, num_ranks = options.rows or RECIPES[options.what], NUM_RANKS[options.what]
    speeds = calibrate([*names, *options.weights]) if options.plan else None
    link = f"links of {options.link}" if options.link else "no limit"
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{Machine.here()}, Gloo"
    print(f"{where}; {num_ranks} ranks, {link}; torch {torch.__version__}")
    in_lab = Lab(2, options.link) if options.link else contextlib.nullcontext()
    with in_lab as lab, rank_environment(num_ranks, options.device) as environment:
        if options.what == "scatter":
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
            numel = int(options.mb * 1e6) // dtype.itemsize // num_ranks * num_ranks
            args = names, options.rounds, options.device, dtype, numel
            rows = run_ranks(time_scatter, num_ranks, LIMIT_S, args=args, lab=lab, environment=environment)[0]
            report(f"{options.mb:g} MB of {options.dtype}, ms", rows)
        else:
            workload = replace(CPU, batch=options.batch) if options.device == "cpu" else GPU
            is_hsdp = options.what == "hsdp"
            gathered = ["twice"] if is_hsdp else options.gathered
            ways = variants(names, options.weights, [each == "twice" for each in gathered])
            sends_plainly = options.what == "step" and options.link is not None
            more = ways, options.rounds, options.device, is_hsdp, workload, sends_plainly
            if options.what == "memory":  # without this, malloc keeps what a row before has freed
                os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
            rows = run_ranks(time_steps, num_ranks, LIMIT_S, args=more, lab=lab, environment=environment)[0]
            report("a step, ms", rows)
            if sends_plainly:
                report_limits(rows, options.link)
            if speeds is not None:
                report_plan(rows, ways, is_hsdp, options.link, speeds)
            print(f"{workload}; parameters are {4 * workload.num_parameters / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
