"""Time steps of DiLoCo on slow links: all at once, in fragments, and without communication.

    python benchmarks/outer.py                       two hosts, links of 10 Mbit/s; needs root
    python benchmarks/outer.py --link 100mbit --width 256 --period 20
    python benchmarks/outer.py --compute-ms 50       a step sleeps, as if a device computed

Each row trains for some periods on hosts of a lab. A time is that of a period over its steps, with
all waiting. Rows take turns, and the median of the rounds is shown. Peak over average: the most bytes that a
host's link carries while one fragment has its turn, over the mean of such times.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom import Machine
from gradwire.lab import Lab
from gradwire.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lm import LM, corpus, pieces, starts

LENGTH, BATCH = 64, 4
NUM_PERIODS = 2


def bytes_sent() -> int:
    """Return the bytes that this host's link has sent, headers included."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return int(next(line.partition(":")[2].split() for line in lines if "eth0:" in line)[8])


def job(
    rank: int, rows: dict[str, tuple[gradwire.DiLoCo | None, str]], options: argparse.Namespace
) -> list[tuple[str, float, float, float]]:
    """Return a name, ms a step, bytes a step, and the peak over the average, for each row and round."""
    text, _ = corpus()
    places = starts(text, (options.period, BATCH), LENGTH, seed=rank)
    found = []
    for number in range(options.rounds):
        for name in list(rows)[number % len(rows) :] + list(rows)[: number % len(rows)]:
            outer, recipe = rows[name]
            found.append((name, *time_row(text, places, outer, recipe, options)))
    return found


@torch.no_grad()
def move(model: torch.nn.Module, step: int) -> None:
    """Move parameters a little, as a step of an optimizer does."""
    for parameter in model.parameters():
        parameter.add_(1e-4 if step % 3 else -1e-4)


def time_row(
    text: torch.Tensor,
    places: torch.Tensor,
    outer: gradwire.DiLoCo | None,
    recipe: str,
    options: argparse.Namespace,
) -> tuple[float, float, float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(LM(options.width, options.layers, LENGTH), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    period = options.period if outer is not None else 10**9
    sent = []
    with gradwire.LocalSGD(model, optimizer, period=period, recipe=recipe, outer=outer) as local:
        for step in range((1 + NUM_PERIODS) * options.period):
            if step == options.period:  # the first period compares layouts
                begin = time.perf_counter()
            if options.compute_ms:
                time.sleep(options.compute_ms / 1e3)
                move(model, step)
            else:
                optimizer.zero_grad()
                model(*pieces(text, places[step % options.period], LENGTH)).backward()
                optimizer.step()
            local.step()
            sent.append(bytes_sent())
        elapsed = time.perf_counter() - begin
    num_steps = NUM_PERIODS * options.period
    window = options.period // (outer.num_fragments if outer is not None else 1)
    if outer is not None and not outer.streams:
        window = options.period // options.fragments
    carried = [sent[i] - sent[i - window] for i in range(options.period, len(sent))]
    mean = (sent[-1] - sent[options.period - 1]) / num_steps
    peak = max(carried) / (mean * window) if outer is not None else float("nan")
    return 1e3 * elapsed / num_steps, mean, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", default="10mbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--period", type=int, default=40)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--compute-ms", type=float, help="sleep so long in a step, as for a device, and train not"
    )
    options = parser.parse_args()
    streaming = gradwire.DiLoCo(fragments=options.fragments, delay=options.delay)
    rows: dict[str, tuple[gradwire.DiLoCo | None, str]] = {
        "no communication": (None, "fp32"),
        "DiLoCo, fp32": (gradwire.DiLoCo(), "fp32"),
        "DiLoCo, int4": (gradwire.DiLoCo(), "int4"),
        f"{options.fragments} fragments, int4": (gradwire.DiLoCo(fragments=options.fragments), "int4"),
        f"{options.fragments} fragments, delay {options.delay}, int4": (streaming, "int4"),
    }
    with Lab(options.hosts, options.link) as lab:
        found = run_ranks(job, options.hosts, 900, args=(rows, options), lab=lab)
    print(f"{options.hosts} hosts, links of {options.link}, period {options.period}; {Machine.here()}")
    print("| | ms a step | over no communication | bytes a step | peak over average |")
    print("|---|---:|---:|---:|---:|")
    base = 0.0
    for name in rows:
        # The slowest rank's time in each round.
        rounds = [max(own, key=lambda row: row[1]) for own in zip(*found, strict=True) if own[0][0] == name]
        ms, sent, peak = (statistics.median(row[i] for row in rounds) for i in (1, 2, 3))
        base = base or ms
        print(f"| {name} | {ms:.1f} | {ms / base:.2f} | {sent:.0f} | {peak:.2f} |")


if __name__ == "__main__":
    main()
