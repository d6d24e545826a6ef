"""Check that attaching, many models and many steps leave no threads, files, sockets or memory behind.

    python benchmarks/leaks.py                     300 times attach and detach, 20 models, 20,000 steps
    python benchmarks/leaks.py --scale 0.1         a tenth of each

Two ranks over Gloo. Each rank counts its threads, open files and sockets, and its resident memory, after a
first part that warms up and after the rest. Exit code 1 if threads, files or sockets have grown, or memory by
more than 64 KiB per attach or model, 41 bytes (a page in a hundred) per step, and 1 MiB in all.
"""

import argparse
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom import Machine
from gradwire.testing import run_ranks

RECIPES = ("int8", "sign", "powersgd:rank=2", "fp32", "bf16")
NOISE_BYTES = 2**20
MAX_BYTES = {"attach and detach": 65536.0, "models": 65536.0, "steps": 41.0}


@dataclass(frozen=True)
class Usage:
    """The threads, files, sockets and memory of a process."""

    threads: int
    files: int
    sockets: int
    rss_bytes: int

    @classmethod
    def now(cls) -> "Usage":
        gc.collect()
        deadline = time.monotonic() + 5  # threads of closed groups need a moment to end
        links, num_threads = _links(), len(list(Path("/proc/self/task").iterdir()))
        while time.monotonic() < deadline:
            time.sleep(0.1)
            later = _links(), len(list(Path("/proc/self/task").iterdir()))
            if later == (links, num_threads):
                break
            links, num_threads = later
        sockets = sum(link.startswith("socket:") for link in links)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(num_threads, len(links) - sockets, sockets, pages * os.sysconf("SC_PAGE_SIZE"))


def _links() -> list[str]:
    # os.path.realpath, unlike os.readlink, takes the descriptor of this listing, which is gone already.
    return sorted(os.path.realpath(link).rpartition("/")[2] for link in Path("/proc/self/fd").iterdir())


def make_model() -> DistributedDataParallel:
    """Make a model of several buckets."""
    net = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 16))
    return DistributedDataParallel(net, bucket_cap_mb=0.02)


def step(model: nn.Module) -> None:
    """Run one backward pass."""
    model.zero_grad()
    model(torch.randn(4, 32)).square().mean().backward()


def attach_and_detach(count: int) -> None:
    """Attach to one model, take two steps and detach, again and again."""
    model = make_model()
    for number in range(count):
        with gradwire.attach(model, RECIPES[number % len(RECIPES)]):
            step(model)
            step(model)


def make_models(count: int) -> None:
    """Train models side by side, each with a wire, and drop all of them."""
    models = [make_model() for _ in range(count)]
    wires = [gradwire.attach(model, RECIPES[i % len(RECIPES)]) for i, model in enumerate(models)]
    for _ in range(4):
        for model in models:
            step(model)
    if count > 2:  # half of the wires end by themselves
        for wire in wires[::2]:
            wire.detach()


def take_steps(count: int) -> None:
    """Train one model."""
    model = make_model()
    with gradwire.attach(model, "int4"):
        for _ in range(count):
            step(model)


LOADS: dict[str, tuple[Callable[[int], None], int]] = {
    "attach and detach": (attach_and_detach, 300),
    "models": (make_models, 20),
    "steps": (take_steps, 20_000),
}


def load(rank: int, name: str, count: int) -> tuple[Usage, Usage, list[str]]:
    """Warm up, then run a load; return what this rank held before and after it, and its threads."""
    run, _ = LOADS[name]
    run(count if name == "models" else max(count // 5, 5))  # models live side by side, and so need room
    before = Usage.now()
    run(count)
    return before, Usage.now(), [thread.name for thread in threading.enumerate()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="a part of each load")
    options = parser.parse_args()
    print(f"{Machine.here()}; 2 ranks; torch {torch.__version__}")
    names = f"{'threads':>10} {'files':>10} {'sockets':>10} {'RSS MiB':>14} {'bytes each':>11}"
    print(f"{'':18} {'count':>6} {names}")
    is_good = True
    for name, (_, number) in LOADS.items():
        count = max(int(number * options.scale), 10)
        results = run_ranks(load, 2, timeout=120 + 0.2 * count, args=(name, count))
        before, after, _ = max(results, key=lambda each: each[1].rss_bytes - each[0].rss_bytes)
        growth = (after.rss_bytes - before.rss_bytes) / count
        is_flat = after.threads <= before.threads and after.files <= before.files
        is_flat = (
            is_flat
            and after.sockets <= before.sockets
            and growth <= max(MAX_BYTES[name], NOISE_BYTES / count)
        )
        is_good = is_good and is_flat
        mib = [usage.rss_bytes / 2**20 for usage in (before, after)]
        print(
            f"{name:18} {count:6,} {before.threads:4} {after.threads:5} {before.files:4} {after.files:5} "
            f"{before.sockets:4} {after.sockets:5} {mib[0]:6.1f} {mib[1]:7.1f} {growth:11.1f}"
            f"{'' if is_flat else '  <- grows'}",
            flush=True,
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
