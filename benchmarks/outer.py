"""Time steps of DiLoCo on slow links: all at once, in fragments, and without communication.

    python benchmarks/outer.py                       two hosts, links of 10 Mbit/s; needs root
    python benchmarks/outer.py --link 100mbit --width 512 --period 20
    python benchmarks/outer.py --compute-ms 23       a step sleeps, as if a device computed
    python benchmarks/outer.py --compute-ms 92 --width 384 --streaming      fragments of 1.9 M parameters

Each row trains for some periods on hosts of a lab. A time is that of a period over its steps, with
all waiting. Rows take turns, and the median of the rounds is shown. Link busy: the mean rate over the
link's. Peak over mean: the most bytes that a host's link carries in the time between two turns of fragments,
over the mean of such times. It cannot be less than the largest fragment over a mean one, which is printed
too. A lab's link lets 80 KiB through at once after a pause, so that a turn that is a little early counts with
as much: a fragment should have many times that.
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
from gradwire.lab import Lab, parse_rate
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
    """Return a name, ms a step, bytes a step, and the peak over the mean, for each row and round."""
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
    model = DistributedDataParallel(LM(options.width, options.layers, LENGTH))
    model.broadcast_buffers = False  # as an argument, torch 2.13 renames it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    period = options.period if outer is not None else 10**9
    sent = []
    with gradwire.LocalSGD(model, optimizer, period=period, recipe=recipe, outer=outer) as local:
        for step in range((1 + NUM_PERIODS) * options.period):
            if options.compute_ms:
                time.sleep(options.compute_ms / 1e3)
                move(model, step)
            else:
                optimizer.zero_grad()
                model(*pieces(text, places[step % options.period], LENGTH)).backward()
                optimizer.step()
            local.step()
            sent.append((time.perf_counter(), bytes_sent()))
    sent = sent[options.period - 1 :]  # the first period compares layouts
    (begin, before), (end, after) = sent[0], sent[-1]
    num_steps = len(sent) - 1
    peak = peak_over_mean(sent, (end - begin) * options.period / num_steps / options.fragments)
    return 1e3 * (end - begin) / num_steps, (after - before) / num_steps, peak if outer else float("nan")


def peak_over_mean(sent: list[tuple[float, int]], window_s: float) -> float:
    """Return the most bytes in any window over the mean of windows; bytes between samples count evenly."""
    (begin, before), (end, after) = sent[0], sent[-1]

    def carried_until(when: float) -> float:
        later = next(i for i, (at, _) in enumerate(sent) if at >= when)
        (t0, b0), (t1, b1) = sent[max(later - 1, 0)], sent[later]
        return b1 if t1 == t0 else b0 + (b1 - b0) * (when - t0) / (t1 - t0)

    ends = [at for at, _ in sent if at - begin >= window_s]
    most = max(carried_until(at) - carried_until(at - window_s) for at in ends)
    return most / max((after - before) * window_s / (end - begin), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", default="10mbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--period", type=int, default=40)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--compute-ms", type=float, help="sleep so long in a step, as for a device, and train not"
    )
    parser.add_argument(
        "--streaming", action="store_true", help="only without communication, and with fragments and a delay"
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
    if options.streaming:
        rows = {name: row for name, row in rows.items() if row[0] in (None, streaming)}
    with Lab(options.hosts, options.link) as lab:
        found = run_ranks(job, options.hosts, 900, args=(rows, options), lab=lab)
    print(f"{options.hosts} hosts, links of {options.link}, period {options.period}; {Machine.here()}")
    numels = {name: p.numel() for name, p in LM(options.width, options.layers, LENGTH).named_parameters()}
    sizes = [sum(numels[name] for name in own) for own in streaming.divide(numels)]
    mean = statistics.mean(sizes)
    print(f"{sum(sizes):,} parameters, the largest fragment {max(sizes) / mean:.2f} times a mean one")
    print("| | ms a step | over no communication | bytes a step | link busy | peak over mean |")
    print("|---|---:|---:|---:|---:|---:|")
    base = 0.0
    for name in rows:
        # The slowest rank's time in each round.
        rounds = [max(own, key=lambda row: row[1]) for own in zip(*found, strict=True) if own[0][0] == name]
        ms, sent, peak = (statistics.median(row[i] for row in rounds) for i in (1, 2, 3))
        base = base or ms
        busy = 8 * sent / (ms / 1e3) / parse_rate(options.link)
        print(f"| {name} | {ms:.1f} | {ms / base:.2f} | {sent:.0f} | {busy:.0%} | {peak:.2f} |")


if __name__ == "__main__":
    main()
