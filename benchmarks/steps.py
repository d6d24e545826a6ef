"""Step times of DDP without a hook, torch's own hooks and ours, side by side in one run.

    python benchmarks/steps.py                     two ranks on this machine
    python benchmarks/steps.py --link 100mbit      each rank behind a link of that rate (root, iproute2)
    python benchmarks/steps.py --device cuda       two NCCL ranks, which may share one GPU
    python benchmarks/steps.py --rows noop int8 int8@8 DDP@8 powersgd:rank=4 --rounds 4

A row is a recipe, or one of torch's hooks. ``int8@8`` has a bucket_cap_mb of 8 instead of DDP's own.
``int8@wrap`` is a model that `gradwire.wrap` has made for that link, ``int8@wrap25`` one with a bucket_cap_mb
of 25.

All rows are measured in the same processes, in turns whose order changes from round to round, so that drift
hits all alike. A ratio is the median of the ratios within each round. A step is zero_grad, forward and
backward, and ends when the last rank has ended it. On CUDA, "host" is the time until backward() returns; the
device goes on by itself. Behind a link, the bytes that left a rank's interface are compared with those that
recipes announce.

"Limit" is the least that a step could take on CPU: the cores' time for the work of all ranks, or the time at
which the link has sent all bytes if it sends without a pause what DDP has handed over. "Averaging" times the
exchange alone, without a forward or backward pass: for one bucket, and for all buckets of the model, which
DDP averages two at a time.
"""

import argparse
import contextlib
import copy
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.recipes
from gradwire.averaging import Bucket, open_engine
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.errors import Place
from gradwire.headroom import Machine, Workload
from gradwire.lab import Lab, parse_rate
from gradwire.testing import run_ranks
from groups import open_group, rank_environment
from limits import BucketClock, HandedOver, limit_ms
from turns import ratio, shuffled, slowest

# An even number: of two ranks that are far apart, each is late in every other step.
STEPS_PER_TURN = 4
BASE = "DDP's fp32 allreduce"
# Rows and columns of the matrices in a bucket that is averaged alone.
SIDE = 512
NUM_WARM_UP_TURNS = 1
# Exchanges are recorded when they come for the third time, and DDP rebuilds its buckets after the first step.
NUM_CUDA_WARM_UP_TURNS = 3
# On a long link, TCP needs up to ten steps until it sends a message as fast as later ones: at first, and
# after each pause, as between the turns of a row. A run without pauses does not have those.
NUM_UNTIMED_FAR_STEPS = 10


def torch_bf16(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Call torch's bf16 hook. DDP refuses it on CPU under its own name."""
    return torch_hooks.bf16_compress_hook(state, bucket)


# The hook to register, by name of the row.
PEERS: dict[str, Any] = {
    "DDP": None,
    "torch allreduce": torch_hooks.allreduce_hook,
    "torch fp16": torch_hooks.fp16_compress_hook,
    "torch bf16": torch_bf16,
    "torch noop": noop_hook,
}
DEFAULT_ROWS = [
    "noop",
    *(name for name in PEERS if name != "torch noop"),
    *(name for name in gradwire.recipes.RECIPES if name != "noop"),
]
CPU, GPU = Workload(), Workload(width=1024, num_layers=8, batch=8, sequence=128)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of one row."""

    ms: list[float]
    announced_bytes: float | None
    """Bytes per step that the recipe announces: a mean, since some send more in every other step."""
    sent_bytes: float | None
    """Bytes per step that left the interface, headers included."""
    host_ms: list[float]
    """The times until backward() has returned; the device may not be done then."""
    cpu_ms: float
    """The time per step that the threads of a rank have kept cores busy."""
    handed_over: list[list[HandedOver]]
    """The buckets of each step; empty without a recipe."""


def make_models(
    rows: list[str], module: nn.Module, group: dist.ProcessGroup, link: str | None
) -> tuple[dict[str, DistributedDataParallel], dict[str, gradwire.Wire]]:
    """Return a model for each row, and the wires of those with a recipe."""
    models, wires = {}, {}
    for row in rows:
        name, _, how = row.partition("@")
        bucket_mb = how.removeprefix("wrap")
        own = copy.deepcopy(module)
        options: dict[str, Any] = {"bucket_cap_mb": float(bucket_mb)} if bucket_mb else {}
        if how.startswith("wrap"):
            models[row], wires[row] = gradwire.wrap(own, name, link=link, process_group=group, **options)
            continue
        model = DistributedDataParallel(own, process_group=group, **options)
        if name not in PEERS:
            wires[row] = gradwire.attach(model, name)
        elif PEERS[name] is not None:
            model.register_comm_hook(group, PEERS[name])
        models[row] = model
    return models, wires


def time_steps(
    rank: int,
    names: list[str],
    rounds: int,
    device: str,
    link: str | None,
    workload: Workload,
    warm_up: int,
    num_untimed: int,
) -> dict[str, Measured]:
    group = open_group(rank, device)
    built = workload.build().to(torch.device(device))
    models, wires = make_models(names, built.model, group, link)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    host_seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[int]] = {name: [] for name in names}
    announced: dict[str, list[int]] = {name: [] for name in wires}
    handed_over: dict[str, list[list[HandedOver]]] = {name: [] for name in names}
    clocks = {name: BucketClock(wire) for name, wire in wires.items()}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        for name, model in shuffled(models, turn):
            dist.barrier()
            for _ in range(num_untimed):
                model.zero_grad()
                built.step_loss(model).backward()
            begins: list[float] = []
            before, cpu_before = interface_bytes(), time.process_time()
            for _ in range(STEPS_PER_TURN):
                begin = time.perf_counter()
                begins.append(begin)
                model.zero_grad()
                built.step_loss(model).backward()
                returned = time.perf_counter()
                if device == "cuda":
                    torch.cuda.synchronize()
                if turn >= warm_up:
                    host_seconds[name].append(returned - begin)
                    seconds[name].append(time.perf_counter() - begin)
            after, cpu_s = interface_bytes(), time.process_time() - cpu_before
            if turn >= warm_up:
                cpu_seconds[name].append(cpu_s)
            if turn >= warm_up and before is not None and after is not None:
                sent[name].append(after - before)
            if turn >= warm_up and name in wires:
                steps = wires[name].stats().steps[-STEPS_PER_TURN:]
                announced[name].append(sum(b.bytes_sent or 0 for step in steps for b in step.buckets))
                handed_over[name] += clocks[name].steps_since(begins)
    return {
        name: Measured(
            slowest(values, STEPS_PER_TURN),
            statistics.mean(announced[name]) / STEPS_PER_TURN if name in wires else None,
            statistics.mean(sent[name]) / STEPS_PER_TURN if sent[name] else None,
            slowest(host_seconds[name], STEPS_PER_TURN),
            1e3 * statistics.mean(cpu_seconds[name]) / STEPS_PER_TURN,
            handed_over[name],
        )
        for name, values in seconds.items()
    }


def interface_bytes() -> int | None:
    """Return the bytes that have left this rank's network interface; None if it has none of its own."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, colon, counters = line.partition(":")
        if colon and interface.strip() == name and name != "lo":
            return int(counters.split()[8])
    return None


def layers(bucket: int, numel: int) -> tuple[Slot, ...]:
    """Fill a bucket with square matrices, and a vector for the rest."""
    num_whole, rest = divmod(numel, SIDE * SIDE)
    matrices = [
        Slot(f"layer{bucket}.{i}.weight", i * SIDE * SIDE, torch.Size((SIDE, SIDE)), (SIDE, 1))
        for i in range(num_whole)
    ]
    vector = Slot(f"layer{bucket}.bias", numel - rest, torch.Size((rest,)), (1,))
    return (*matrices, vector) if rest else tuple(matrices)


def time_averaging(rank: int, names: list[str], rounds: int, sizes: list[int]) -> dict[str, list[float]]:
    """Time the exchange of buckets of these sizes, handed over all at once, as DDP does."""
    buckets = [torch.randn(n) for n in sizes]
    group = dist.group.WORLD
    assert group is not None

    def allreduce() -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    def average(name: str) -> Callable[[], None]:
        engine = open_engine(gradwire.recipe(name), group, torch.device("cpu"), f"averaging/{name}")
        layouts = [BucketLayout(i, b.dtype, layers(i, b.numel())) for i, b in enumerate(buckets)]

        def run() -> None:
            futures = [
                engine.start(Bucket(flat, layout, layout is layouts[-1]), Place(rank, 0, layout.index, name))
                for flat, layout in zip(buckets, layouts, strict=True)
            ]
            for future in futures:
                future.wait()
            assert engine.failure is None, engine.failure

        return run

    ways = {BASE: allreduce, **{f"gradwire {n}": average(n) for n in names}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(NUM_WARM_UP_TURNS + rounds):
        for name, run in shuffled(ways, turn):
            for bucket in buckets:
                bucket.normal_()
            dist.barrier()
            begin = time.perf_counter()
            run()
            if turn >= NUM_WARM_UP_TURNS:
                seconds[name].append(time.perf_counter() - begin)
    return {name: slowest(values) for name, values in seconds.items()}


def describe(values: list[float]) -> list[str]:
    """Return the median, and the first and the last tenth."""
    low, *_, high = statistics.quantiles(values, n=10)
    return [f"{value:.1f}" for value in (statistics.median(values), low, high)]


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table, without the columns that are empty in every row."""
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    print("", *(f"| {' | '.join(line[i] for i in used)} |" for line in lines), sep="\n")


def row_of(name: str, steps: dict[str, Measured], limits: dict[str, float], device: str) -> list[str]:
    """Return the cells of a row of the table of steps."""
    row = steps[name]
    pairs = [("DDP", name), ("torch fp16", name), (name, "noop")]
    ratios = [
        f"{ratio(steps[over].ms, steps[under].ms, STEPS_PER_TURN):.2f}" if {over, under} <= set(steps) else ""
        for over, under in pairs
    ]
    counted = ""
    if row.sent_bytes is not None and row.announced_bytes:
        counted = f"{row.sent_bytes / 1e6:.2f} ({row.sent_bytes / row.announced_bytes:.3f})"
    return [
        name if name in PEERS else f"`{name}`",
        *describe(row.ms),
        f"{limits[name]:.1f}" if name in limits else "",
        *ratios,
        f"{statistics.median(row.host_ms):.1f}" if device == "cuda" else "",
        "" if row.announced_bytes is None else f"{row.announced_bytes / 1e6:.2f}",
        counted,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help=f"turns of {STEPS_PER_TURN} steps per row")
    parser.add_argument("--link", help="rate of each rank's link, such as 1gbit; by default no limit")
    parser.add_argument("--delay", help="time from rank to rank, such as 20ms; by default none")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--width", type=int, help="width of the transformer; by default 512, on CUDA 1024")
    parser.add_argument("--layers", type=int, help="number of its layers; by default 6, on CUDA 8")
    parser.add_argument(
        "--rows", nargs="+", default=DEFAULT_ROWS, help="recipes, and torch's hooks, as 'torch fp16'"
    )
    parser.add_argument("--averaging", action="store_true", help="also time the exchange alone")
    options = parser.parse_args()
    names = ["DDP", *(name for name in options.rows if name != "DDP")]
    limit = timedelta(minutes=30).total_seconds()

    workload = CPU if options.device == "cpu" else GPU
    workload = dataclasses.replace(
        workload,
        width=options.width or workload.width,
        num_layers=options.layers or workload.num_layers,
    )
    link = f"links of {options.link}" if options.link else "no limit"
    link += f", {options.delay} long" if options.delay else ""
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{Machine.here()}, Gloo"
    print(
        f"{where}; {options.world_size} ranks, one thread each, {link}; {workload}; torch {torch.__version__}"
    )
    lab_options = options.world_size, options.link, options.delay
    in_lab = Lab(*lab_options) if options.link or options.delay else contextlib.nullcontext()
    with in_lab as lab, rank_environment(options.world_size, options.device) as environment:
        warm_up = NUM_CUDA_WARM_UP_TURNS if options.device == "cuda" else NUM_WARM_UP_TURNS
        num_untimed = NUM_UNTIMED_FAR_STEPS if options.delay else 0
        args = names, options.rounds, options.device, options.link, workload, warm_up, num_untimed
        results = run_ranks(
            time_steps, options.world_size, limit, args=args, lab=lab, environment=environment
        )
    steps = results[0]
    quantiles = ["median", "p10", "p90"]
    ratios = ["DDP over it", "torch fp16 over it", "over noop"]
    header = ["a step, ms", *quantiles, "limit", *ratios, "host, ms", "MB sent", "on the interface"]
    limits = {}
    if options.device == "cpu":
        rate = parse_rate(options.link) if options.link else None
        limits = {
            name: limit_ms(row.cpu_ms, options.world_size, rate, row.sent_bytes, row.handed_over)
            for name, row in steps.items()
        }
    print_table(header, [row_of(name, steps, limits, options.device) for name in steps])

    if not options.averaging:
        return
    bucket, numel = 6_553_600, workload.num_parameters  # 25 MiB, DDP's default
    whole = [bucket] * (numel // bucket) + [numel % bucket]
    ours = [name for name in names if name not in PEERS and name != "noop" and "@" not in name]
    for what, sizes in {"averaging one bucket, ms": [bucket], "averaging all buckets, ms": whole}.items():
        averaging = run_ranks(
            time_averaging, options.world_size, limit, args=(ours, 4 * options.rounds, sizes)
        )[0]
        rows = [
            [name, *describe(values), f"{ratio(values, averaging[BASE]):.3f}"]
            for name, values in averaging.items()
        ]
        print_table([what, *quantiles, "over DDP's"], rows)


if __name__ == "__main__":
    main()
