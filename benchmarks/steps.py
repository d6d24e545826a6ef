"""Step times of DDP without a hook, torch's own hooks and ours, side by side in one run.

    python benchmarks/steps.py                  two ranks on this machine
    python benchmarks/steps.py --world-size 4 --rounds 20

Everything is measured in the same processes, in turns whose order changes from round to round, so that drift
hits all alike; a ratio is the median of the ratios within each round. A step is zero_grad, forward and
backward; its time is that of the slowest rank. "Averaging" is the exchange alone,
without a forward or backward beside it: of one bucket, and of the whole model's, which DDP averages two at a
time.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import Place
from gradwire.exchanges import Context
from gradwire.execution import Task, open_lane
from gradwire.headroom import Machine, Workload
from gradwire.layout import BucketLayout, Slot
from gradwire.memory import Memory
from gradwire.testing import run_ranks

STEPS_PER_TURN = 3
BASE = "DDP's fp32 allreduce"
T = TypeVar("T")
NUM_WARM_UP_TURNS = 1


def torch_bf16(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Torch's bf16 hook under another name: by its own, DDP refuses it on CPU."""
    return torch_hooks.bf16_compress_hook(state, bucket)


# name: what to register, and which of torch's to compare with
ROWS: dict[str, Any] = {
    "noop": "noop",
    "DDP, no hook": None,
    "torch allreduce_hook": torch_hooks.allreduce_hook,
    "torch fp16_compress_hook": torch_hooks.fp16_compress_hook,
    "torch bf16_compress_hook": torch_bf16,
    "gradwire fp32": "fp32",
    "gradwire fp16": "fp16",
    "gradwire bf16": "bf16",
}
PEERS = {
    "fp32": "torch allreduce_hook",
    "fp16": "torch fp16_compress_hook",
    "bf16": "torch bf16_compress_hook",
}


def slowest(seconds: list[float]) -> list[float]:
    """Of each step, the time on the slowest rank, in milliseconds."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return (1e3 * times).tolist()


def shuffled(rows: dict[str, T], turn: int) -> list[tuple[str, T]]:
    """The rows in an order that is the turn's own, the same on every rank."""
    return random.Random(turn).sample(list(rows.items()), len(rows))


def ratio(values: list[float], base: list[float], per_round: int = 1) -> float:
    """How much longer, as the median over rounds."""
    rounds = zip(
        *(
            [statistics.mean(v[i : i + per_round]) for i in range(0, len(v), per_round)]
            for v in (values, base)
        ),
        strict=True,
    )
    return float(statistics.median(a / b for a, b in rounds))


def time_steps(rank: int, rounds: int) -> dict[str, list[float]]:
    models = {}
    for name, what in ROWS.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(Workload().model())
        if isinstance(what, str):
            gradwire.attach(model, what)
        elif what is not None:
            model.register_comm_hook(None, what)
        models[name] = model
    batch = Workload().inputs()
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(NUM_WARM_UP_TURNS + rounds):
        for name, model in shuffled(models, turn):
            dist.barrier()
            for _ in range(STEPS_PER_TURN):
                begin = time.perf_counter()
                model.zero_grad()
                model(batch).square().mean().backward()
                if turn >= NUM_WARM_UP_TURNS:
                    seconds[name].append(time.perf_counter() - begin)
    return {name: slowest(values) for name, values in seconds.items()}


def time_averaging(rank: int, rounds: int, sizes: list[int]) -> dict[str, list[float]]:
    """The exchange of buckets of these sizes, handed over all at once as DDP does."""
    buckets = [torch.randn(n) for n in sizes]
    world_size = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None

    def allreduce() -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    def exchange(name: str) -> Callable[[], None]:
        lane, recipe = open_lane(group, torch.device("cpu"), f"averaging/{name}"), gradwire.recipe(name)
        memory = Memory()

        def average(index: int, flat: Tensor, lane_group: Any, scratch: Any) -> Tensor:
            slot = Slot(f"parameter{index}", 0, flat.shape, flat.stride())
            layout = BucketLayout(index, flat.dtype, (slot,))
            recipe.exchange.run(flat, Context(lane_group, scratch, 1 / world_size, layout, memory))
            return flat

        def run() -> None:
            place = Place(rank, 0, 0, name)
            futures = [
                lane.submit(Task(b, partial(average, i), place, lambda *_: None))
                for i, b in enumerate(buckets)
            ]
            for future in futures:
                future.wait()
            assert lane.failure is None, lane.failure

        return run

    ways = {BASE: allreduce, **{f"gradwire {n}": exchange(n) for n in PEERS}}
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


def describe(values: list[float]) -> str:
    low, *_, high = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):8.1f} {low:8.1f} {high:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=12, help=f"turns of {STEPS_PER_TURN} steps for each row"
    )
    options = parser.parse_args()
    limit = timedelta(minutes=30).total_seconds()

    ranks = f"{options.world_size} ranks, one thread each, Gloo on loopback"
    print(f"{Machine.here()}; {ranks}; torch {torch.__version__}")
    steps = run_ranks(time_steps, options.world_size, limit, args=(options.rounds,))[0]
    print(f"\n{'a step, ms':28} {'median':>8} {'p10':>8} {'p90':>8}   over DDP   over torch's hook")
    for name, values in steps.items():
        over_ddp = ratio(values, steps["DDP, no hook"], STEPS_PER_TURN)
        peer = PEERS.get(name.removeprefix("gradwire "))
        over_peer = f"{ratio(values, steps[peer], STEPS_PER_TURN):8.3f}" if peer else ""
        print(f"{name:28} {describe(values)}   {over_ddp:8.3f}   {over_peer}")

    bucket, numel = 6_553_600, Workload().num_parameters  # 25 MiB, DDP's default
    whole = [bucket] * (numel // bucket) + [numel % bucket]
    for what, sizes in {"averaging one bucket, ms": [bucket], "averaging all buckets, ms": whole}.items():
        averaging = run_ranks(time_averaging, options.world_size, limit, args=(4 * options.rounds, sizes))[0]
        print(f"\n{what:28} {'median':>8} {'p10':>8} {'p90':>8}   over DDP's")
        for name, values in averaging.items():
            print(f"{name:28} {describe(values)}   {ratio(values, averaging[BASE]):8.3f}")


if __name__ == "__main__":
    main()
