"""Takes step times of all recipes side by side: on ranks of this machine, of a lab, or of a cluster."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from gradwire.headroom.contenders import TURN_LIMIT_S, measure
from gradwire.headroom.contest import Contest, Entry, Found, Outcome
from gradwire.headroom.records import ALLREDUCE, Machine, Record, Row, ring_bytes
from gradwire.headroom.workloads import Workload, count_of
from gradwire.lab import Lab, format_rate
from gradwire.peers import join_rendezvous, timeout_of
from gradwire.ranks import run_ranks, send_message

Progress = Callable[[int, int], None]


def measure_steps(
    contest: Contest, world_size: int, *, lab: Lab | None = None, on_progress: Progress | None = None
) -> Record:
    """Time the contest's recipes, plain DDP and no communication, taking turns in one run.

    Args:
        contest: what to measure.
        world_size: number of ranks, all on this machine, each with one thread.
        lab: where the ranks run; by default on this machine and its loopback.
        on_progress: called with ``(steps done, steps in all)`` of all rows together.

    Raises RanksFailed when a rank fails; the text says why.
    """

    def on_message(rank: int, progress: tuple[int, int]) -> None:
        if on_progress is not None:
            on_progress(*progress)

    # Each turn has its own limit, kept by the ranks; this one is never reached before those.
    timeout = TURN_LIMIT_S * (4 + 30 * len(contest.rows))
    outcomes = run_ranks(_measure_rank, world_size, timeout, args=(contest,), on_message=on_message, lab=lab)
    return to_record(contest, outcomes, lab=lab, one_machine=True)


def measure_here(contest: Contest, *, on_progress: Progress | None = None) -> Record | None:
    """`measure_steps` on the ranks of the default process group, which every one of them calls.

    Returns the record on rank 0 and None on the others.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    outcome = measure(contest, on_progress or (lambda *_: None))
    # As text through the store: nothing is unpickled that came over a network.
    world = dist.group.WORLD
    assert world is not None
    store, meeting = (
        world.get_group_store(),
        join_rendezvous(world, timeout_of(world), "headroom.measure_here"),
    )
    times = [[*row.times_s] for row in outcome.rows]
    counts = [row.bytes_per_step for row in outcome.rows]
    store.set(f"{meeting}/{rank}", json.dumps({"times": times, "counts": counts}))
    if rank != 0:
        store.wait([f"{meeting}/read"])
        return None
    outcomes = [outcome]
    for peer in range(1, size):
        told = json.loads(store.get(f"{meeting}/{peer}"))
        rows = [
            dataclasses.replace(row, times_s=seconds_each, bytes_per_step=count)
            for row, seconds_each, count in zip(outcome.rows, told["times"], told["counts"], strict=True)
        ]
        outcomes.append(dataclasses.replace(outcome, rows=rows))
    store.set(f"{meeting}/read", "")
    one_machine = os.environ.get("LOCAL_WORLD_SIZE", "") == str(size)
    return to_record(contest, outcomes, lab=None, one_machine=one_machine)


def _measure_rank(rank: int, contest: Contest) -> Outcome:
    return measure(contest, lambda *progress: send_message(progress) if rank == 0 else None)


def to_record(contest: Contest, outcomes: list[Outcome], *, lab: Lab | None, one_machine: bool) -> Record:
    """Every rank's outcome, made one."""
    first = outcomes[0]
    described = str(contest.workload)
    if not isinstance(contest.workload, Workload):
        described += f", {count_of(first.num_parameters)} parameters"
    rows = [_row([o.rows[i] for o in outcomes], first.gradient_bytes) for i in range(len(first.rows))]
    noop_last = sorted(rows, key=lambda row: row.recipe == str(gradwire.noop()))
    return Record(
        **conditions(lab, one_machine),
        world_size=len(outcomes),
        threads_per_rank=first.num_threads,
        backend=first.backend,
        device=first.device,
        interleaved=True,
        bucket_mb=contest.bucket_mb,
        workload=described,
        num_parameters=first.num_parameters,
        gradient_bytes=first.gradient_bytes,
        rows=tuple(noop_last),
    )


def conditions(lab: Lab | None, one_machine: bool) -> dict[str, Any]:
    """What every record says about where and when it was taken."""
    return {
        "gradwire_version": gradwire.__version__,
        "torch_version": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": Machine.here(),
        "link": None if lab is None or lab.bits_per_s is None else format_rate(lab.bits_per_s),
        "one_machine": one_machine,
    }


def _row(found: list[Found], gradient_bytes: int) -> Row:
    entry, size = found[0].entry, len(found)
    counts = [f.bytes_per_step for f in found]
    known = [count for count in counts if count is not None]
    sent = max(known) if len(known) == size else None
    if entry.recipe is None:
        sent = ring_bytes(gradient_bytes, size)
    return Row(
        _name(entry),
        slowest_ms(f.times_s for f in found),
        sent,
        entry.bucket_mb,
        found[0].num_messages,
        found[0].wait_ms,
        found[0].work_ms,
        found[0].gradient_error,
    )


def _name(entry: Entry) -> str:
    return ALLREDUCE if entry.recipe is None else str(entry.recipe)


def slowest_ms(times_s: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """A step is over when the slowest rank is through; in ms, to the microsecond."""
    return tuple(round(1e3 * max(times), 3) for times in zip(*times_s, strict=True))
