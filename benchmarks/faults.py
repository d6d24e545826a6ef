"""Plant faults in small runs, and check that every other rank ends soon, with an error that names the rank.

    python benchmarks/faults.py --faults 500 --jobs 12          500 random faults, 12 runs at a time
    python benchmarks/faults.py --seed 3 --only 17              one of them again, with all output

A fault is drawn from the seed and its number: the number of ranks, recipe or hook, who hosts the store, the
rank, the step, the place (data, forward, hook, exchange, optimizer), and the way to fail (signals,
exceptions, exits). Ranks are real processes over Gloo, which end as programs do. Every other rank is a
survivor. It must end with an error, by no signal, within three timeouts of the group and a minute to end, and
the error must name the rank that failed.
"""

import argparse
import collections
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # ranks are forked from this process, and DistributedDataParallel imports it
from torch._C._distributed_c10d import TCPStore

import gradwire
from fault_ranks import HOOKS, KINDS, PLACES, PLANTED, RAW, RECIPES, Fault, become_rank, run_rank
from gradwire.headroom import Machine
from gradwire.ops import warm_up

# Faults that have once been an abort, a hang, or an error that did not name the rank that failed.
NAMED = [
    Fault(-1, 3, "our raw hook inside a hook", "ValueError", "hook", 1, 0, 0, rank_0_hosts=True),
    Fault(-2, 3, "torch's hook", "MemoryError", "hook", 0, 4, 0, rank_0_hosts=False),
    Fault(-3, 3, "int8", "kill", "optimizer", 1, 0, 0, rank_0_hosts=False),
    Fault(-4, 2, "int4", "ValueError", "data", 1, 2, 0, rank_0_hosts=True),
    Fault(-5, 3, "raw allreduce", "exit", "data", 2, 0, 0, rank_0_hosts=True),
    Fault(-6, 4, "a hook with callbacks", "kill", "optimizer", 2, 3, 1, rank_0_hosts=True),
    Fault(-7, 3, "torch's hook", "MemoryError", "optimizer", 0, 0, 0, rank_0_hosts=True),
    Fault(-8, 3, "torch's hook", "ValueError", "hook", 0, 3, 0, rank_0_hosts=True),
    Fault(-9, 4, "torch's hook", "stop", "data", 3, 1, 0, rank_0_hosts=True),
    Fault(-10, 3, "raw powersgd", "kill", "hook", 0, 0, 0, rank_0_hosts=True),
]
SLOW_START_S = 120.0
# Beyond three timeouts. On a busy machine, an interpreter alone takes seconds to end.
SLOW_END_S = 60.0
HANGS, ABORTS, SWALLOWS, ANONYMOUS, GOOD = "hang", "abort", "no error", "origin not named", "good"


def draw(seed: int, number: int) -> Fault:
    """Draw one fault."""
    choice = random.Random(f"{seed} {number}")
    world_size = choice.choice([2, 3, 3, 4])
    averaging = choice.choice([choice.choice(RECIPES), choice.choice(RECIPES), *HOOKS, choice.choice(RAW)])
    return Fault(
        number,
        world_size,
        averaging,
        choice.choice(KINDS),
        choice.choice(PLACES if averaging not in RAW else [p for p in PLACES if p != "exchange"]),
        choice.randrange(world_size),
        step := choice.choice([0, 0, 1, 1, 2, 3, 5]),
        # The first two steps are exchanged in one bucket.
        choice.randrange(2) if averaging not in RAW and step > 1 else 0,
        choice.random() < 0.5,
    )


Result = tuple[Fault, dict[int, str]]
"""A fault, and the verdict on every survivor, by rank."""


@dataclass
class Run:
    """One case under way: its processes, their exit codes, and what they have written."""

    fault: Fault
    folder: Path
    timeout_s: float
    pids: dict[int, int]
    begin: float = field(default_factory=time.monotonic)
    failed_at: float | None = None
    """The time when the faulty rank had ended or was stopped."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes by rank; minus the number of the signal that ended a rank."""

    @classmethod
    def start(cls, fault: Fault, folder: Path, launcher_port: int, timeout_s: float) -> "Run":
        folder.mkdir()
        pids = {}
        for rank in range(fault.world_size):
            pids[rank] = os.fork()
            if pids[rank] == 0:
                become_rank(fault, rank, folder)
                run_rank(fault, rank, folder, launcher_port, timeout_s)
                sys.exit(0)
        return cls(fault, folder, timeout_s, pids)

    def poll(self) -> bool:
        """Note which ranks have ended; return True if the case is over."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
                if done and not os.WIFSTOPPED(status):
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                if done and rank == self.fault.rank:
                    self.failed_at = time.monotonic()
        survivors_left = self.pids.keys() - self.codes.keys() - {self.fault.rank}
        waited_s = time.monotonic() - (self.failed_at or self.begin + SLOW_START_S)
        return not survivors_left or waited_s > 3 * self.timeout_s + SLOW_END_S

    @property
    def began(self) -> bool:
        """True if the fault has happened, or the ranks have trained without it."""
        return (self.folder / PLANTED).exists() or 0 in self.codes.values()

    def end(self) -> dict[int, str]:
        """Kill what is left, and return the verdict on every survivor, by rank."""
        verdicts = {rank: self._verdict(rank) for rank in self.pids if rank != self.fault.rank}
        for rank in verdicts.keys() - self.codes.keys():
            os.kill(self.pids[rank], signal.SIGUSR1)  # it writes its stack
            time.sleep(0.5)
        self.kill()
        return verdicts

    def kill(self) -> None:
        """Kill every rank that is left."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def text(self, rank: int) -> str:
        """Return what a rank has written."""
        return (self.folder / f"rank{rank}.txt").read_text(errors="replace")

    def _verdict(self, rank: int) -> str:
        code = self.codes.get(rank)
        if code is None:
            return HANGS
        if code < 0:
            return ABORTS
        if code == 0:
            return SWALLOWS
        return GOOD if names_origin(self.text(rank), self.fault) else ANONYMOUS


def names_origin(text: str, fault: Fault) -> bool:
    """Return True if an error's text names the rank that failed, and no other."""
    error = text[text.rfind("Traceback (most recent call last)") :]
    rank = fault.rank
    told = rf"(Error|Interrupt|^gradwire)\w*: rank {rank}, step|[Ff]urthest behind is rank {rank}\b"
    told += rf"|failed on rank {rank}\b|rank\(s\) {rank} of|rank {rank}: its program ended"
    told += rf"|had failed: rank {rank}, step"
    if fault.host_fails:
        told += "|The group's store does not answer"
    return re.search(told, error, re.MULTILINE) is not None


def host_store() -> tuple[int, int]:
    """Start a process that hosts a store, as a launcher does; return its pid and port."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign ends it
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        signal.pause()
    os.close(writer)
    return pid, int(os.read(reader, 16))


def run_all(
    faults: list[Fault], jobs: int, timeout_s: float, deadline: float = math.inf, *, keep: bool = False
) -> list[Result]:
    """Run the cases, ``jobs`` at a time; return each with its verdicts, after a Ctrl-C those so far."""
    folder, waiting = Path(tempfile.mkdtemp()), collections.deque(faults)
    running: list[Run] = []
    results: list[Result] = []
    (launcher, port), parent = host_store(), os.getpid()
    try:
        while waiting or running:
            if time.monotonic() > deadline:
                waiting.clear()
            while waiting and len(running) < jobs:
                fault = waiting.popleft()
                running.append(Run.start(fault, folder / str(fault.number), port, timeout_s))
            time.sleep(0.02)
            for run in [run for run in running if run.poll()]:
                running.remove(run)
                if (verdicts := end(run, keep=keep)) is not None:
                    results.append((run.fault, verdicts))
    except KeyboardInterrupt:
        if os.getpid() != parent:  # the errors of ranks, which are forked, pass by here too
            raise
        print("stopped early", flush=True)
    finally:
        if os.getpid() == parent:
            for run in running:
                run.kill()
            os.kill(launcher, signal.SIGKILL)
            os.waitpid(launcher, 0)
            shutil.rmtree(folder)
    return results


def end(run: Run, *, keep: bool) -> dict[int, str] | None:
    """End a case, show what was wrong, and with ``keep`` all output; return None if it does not count."""
    verdicts, counts = run.end(), run.began
    if not counts:
        print(f"{run.fault}: not counted, since its ranks were too slow to meet in time")
    for rank, verdict in verdicts.items():
        if counts and verdict != GOOD:
            print(f"{run.fault}\n  rank {rank}: {verdict}: {_last_lines(run.text(rank))}", flush=True)
    if keep:
        for rank in run.pids:
            print(f"--- rank {rank}, exit code {run.codes.get(rank)}\n{run.text(rank)}")
    shutil.rmtree(run.folder)
    return verdicts if counts else None


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    stacks = [line for line in lines if line.startswith(("File", "Thread", "Current thread"))]
    return " | ".join([*lines[-3:], *stacks[-40:]] if stacks else lines[-3:])[-3000:]


def table_of(results: list[Result]) -> str:
    """Return the number of cases of each kind by their worst verdict, in Markdown."""
    order = [HANGS, ABORTS, SWALLOWS, ANONYMOUS, GOOD]
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for fault, verdicts in results:
        for kind in ("all", fault.kind):
            rows[kind][min(verdicts.values(), key=order.index)] += 1
    shown = order[::-1]
    lines = [" | ".join(["| fault", *shown]) + " |", "|---|" + "---:|" * len(shown)]
    for kind, row in sorted(rows.items(), key=lambda each: (each[0] == "all", each[0])):
        lines.append(" | ".join([f"| {kind}", *(str(row[verdict]) for verdict in shown)]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="how many to plant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many runs at a time")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds, of the process group")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run these, and show all output")
    parser.add_argument("--named", action="store_true", help="run faults that once went wrong instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdicts to this file")
    options = parser.parse_args()
    drawn = [draw(options.seed, number) for number in options.only or range(options.faults)]
    faults = NAMED if options.named else drawn
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that ranks end with this process
    for name in RECIPES:  # load kernels once: ranks are forked from this process
        warm_up(torch.device("cpu"), gradwire.recipe(name).exchange.kernels)
    deadline = begin + options.seconds
    results = run_all(faults, options.jobs, options.timeout, deadline, keep=bool(options.only))
    took_s = time.monotonic() - begin
    print(f"{Machine.here()}; torch {torch.__version__}; {len(results)} faults; {took_s:.0f} s\n")
    print(f"{table_of(results)}\n")
    if options.json:
        rows = [{"fault": asdict(fault), "verdicts": verdicts} for fault, verdicts in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    verdicts = [verdict for _, each in results for verdict in each.values()]
    known = [v for fault, each in results if not fault.host_fails for v in each.values()]
    share = known.count(GOOD) / max(len(known), 1)
    print(f"survivors: {collections.Counter(verdicts)}; origin named, where the store lived: {share:.1%}")
    return 0 if set(verdicts) <= {GOOD, ANONYMOUS} and share >= 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
