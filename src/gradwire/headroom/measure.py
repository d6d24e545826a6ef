"""Take step times of all recipes side by side: on ranks of this machine, of a lab, or of a cluster."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from gradwire.headroom.benchmark import Benchmark, Measurement, OnProgress, RankResult
from gradwire.headroom.benchmark_rank import TURN_LIMIT_S, run_benchmark
from gradwire.headroom.devices import join_torchrun, takes_turns
from gradwire.headroom.records import ALLREDUCE, ALONE, NOOP, Machine, Record, Row, ring_bytes, row_name
from gradwire.headroom.sharding import Sharding
from gradwire.headroom.workloads import Workload, format_count
from gradwire.lab import Lab
from gradwire.links import format_delay, format_rate
from gradwire.peers import join_rendezvous, timeout_of
from gradwire.ranks import run_ranks, send_message, sharing_gpus
from gradwire.torch_private import store_of


def measure_steps(
    benchmark: Benchmark, world_size: int, *, lab: Lab | None = None, on_progress: OnProgress | None = None
) -> Record:
    """Time the benchmark's recipes, plain DDP and no communication, taking turns in one run.

    Args:
        benchmark: the recipes and the model to train.
        world_size: number of ranks, all on this machine, each with one thread.
        lab: the lab to run in; by default this machine and its loopback.
        on_progress: called with ``(steps done, steps in all)`` of all rows together.

    Raises RanksFailed if a rank fails; the text says why.
    """

    def on_message(rank: int, progress: tuple[int, int]) -> None:
        if on_progress is not None:
            on_progress(*progress)

    # The ranks limit each turn themselves, and are never slower than this.
    timeout = TURN_LIMIT_S * (4 + 30 * len(benchmark.compared))
    with sharing_gpus(world_size if benchmark.device == "cuda" else 0) as environment:
        results = run_ranks(
            _measure_rank,
            world_size,
            timeout,
            args=(benchmark,),
            on_message=on_message,
            lab=lab,
            environment=environment,
        )
        in_turns = takes_turns(benchmark.device, world_size, environment)
    return _to_record(benchmark, results, lab=lab, one_machine=True, in_turns=in_turns)


def measure_here(benchmark: Benchmark, *, on_progress: OnProgress | None = None) -> Record | None:
    """Run `measure_steps` on the ranks of the default process group; each of them calls this.

    Returns the record on rank 0 and None on the others.
    """
    results = _gather_results(run_benchmark(benchmark, on_progress or (lambda *_: None)))
    if results is None:
        return None
    one_machine = os.environ.get("LOCAL_WORLD_SIZE", "") == str(len(results))
    in_turns = takes_turns(benchmark.device, len(results))
    return _to_record(benchmark, results, lab=None, one_machine=one_machine, in_turns=in_turns)


def measure_under_torchrun(benchmark: Benchmark, *, on_progress: OnProgress | None = None) -> Record | None:
    """Make the process group of torchrun's ranks, run `measure_here` on it, and close it."""
    join_torchrun(benchmark.device)
    try:
        return measure_here(benchmark, on_progress=on_progress)
    finally:
        dist.destroy_process_group()


def _measure_rank(rank: int, benchmark: Benchmark) -> RankResult:
    return run_benchmark(benchmark, lambda *progress: send_message(progress) if rank == 0 else None)


def _gather_results(result: RankResult) -> list[RankResult] | None:
    """Return every rank's result on rank 0, and None on the others."""
    # As JSON through the store: nothing that came over a network is unpickled.
    world = dist.group.WORLD
    assert world is not None
    store, rank = store_of(world), dist.get_rank()
    key = join_rendezvous(world, timeout_of(world), "headroom.measure_here")
    times = [measurement.times_s for measurement in result.measurements]
    counts = [measurement.bytes_per_step for measurement in result.measurements]
    store.set(f"{key}/{rank}", json.dumps({"times": times, "counts": counts}))
    if rank != 0:
        store.wait([f"{key}/read"])
        return None
    others = [json.loads(store.get(f"{key}/{peer}")) for peer in range(1, dist.get_world_size())]
    store.set(f"{key}/read", "")
    return [result, *(_with_figures(result, other["times"], other["counts"]) for other in others)]


def _with_figures(
    result: RankResult, times_s: Sequence[Sequence[float]], counts: Sequence[int | None]
) -> RankResult:
    """Return the result with the step times and the bytes of another rank."""
    measurements = [
        dataclasses.replace(measurement, times_s=tuple(times), bytes_per_step=count)
        for measurement, times, count in zip(result.measurements, times_s, counts, strict=True)
    ]
    return dataclasses.replace(result, measurements=tuple(measurements))


def _to_record(
    benchmark: Benchmark,
    results: Sequence[RankResult],
    *,
    lab: Lab | None,
    one_machine: bool,
    in_turns: bool,
) -> Record:
    """Make one record of every rank's result."""
    first = results[0]
    description = str(benchmark.workload)
    if not isinstance(benchmark.workload, Workload):
        description += f", {format_count(first.num_parameters)} parameters"
    by_variant = zip(*(result.measurements for result in results), strict=True)
    rows = [_row(ranks, first.gradient_bytes, benchmark.sharding) for ranks in by_variant]
    baselines = ("", NOOP, ALONE)
    noop_last = sorted(rows, key=lambda row: baselines.index(row.recipe if row.recipe in baselines else ""))
    return Record(
        **conditions(lab, one_machine),
        world_size=len(results),
        threads_per_rank=first.num_threads,
        backend=first.backend,
        device=first.device,
        interleaved=True,
        bucket_mb=benchmark.bucket_mb,
        workload=description,
        num_parameters=first.num_parameters,
        gradient_bytes=first.gradient_bytes,
        num_layers=first.num_layers,
        rows=tuple(noop_last),
        proposal=first.proposal,
        takes_turns=in_turns,
        sharding=None if benchmark.sharding is None else benchmark.sharding.kind,
    )


def conditions(lab: Lab | None, one_machine: bool) -> dict[str, Any]:
    """Return the fields of a record that say where and when it was taken."""
    return {
        "gradwire_version": gradwire.__version__,
        "torch_version": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": Machine.here(),
        "link": None if lab is None or lab.bits_per_s is None else format_rate(lab.bits_per_s),
        "delay": None if lab is None or lab.delay_s is None else format_delay(lab.delay_s),
        "one_machine": one_machine,
    }


def _row(ranks: Sequence[Measurement], gradient_bytes: int, sharding: Sharding | None) -> Row:
    first, world_size = ranks[0], len(ranks)
    known = [rank.bytes_per_step for rank in ranks if rank.bytes_per_step is not None]
    sent = max(known) if len(known) == world_size else None
    name = ALONE if first.variant.is_alone else row_name(first.variant.recipe)
    if name == ALONE:
        sent = 0
    elif name == ALLREDUCE:
        sent = ring_bytes(gradient_bytes, world_size)
        if sharding is not None:
            sent = sharding.sent_bytes(gradient_bytes, world_size)
    return Row(
        name,
        slowest_ms(rank.times_s for rank in ranks),
        sent,
        first.variant.bucket_mb,
        first.num_messages,
        first.wait_ms,
        first.work_ms,
        first.gradient_error,
        first.decisions,
    )


def slowest_ms(times_s: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Return the time of each step to its end on the slowest rank, in ms and rounded to the microsecond.

    Of two ranks that are far apart, each is the slow one in every other step. So the end of a step is that of
    the rank that has spent most time since the beginning of a pair of steps.
    """
    found: list[float] = []
    steps = list(zip(*times_s, strict=True))
    for first, *second in (steps[i : i + 2] for i in range(0, len(steps), 2)):
        end = max(first)
        found.append(end)
        found += [max(map(sum, zip(first, times, strict=True))) - end for times in second]
    return tuple(round(1e3 * each, 3) for each in found)
