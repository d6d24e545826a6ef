"""Inside a rank: the models that take turns, one for each row of a measurement."""

from __future__ import annotations

import functools
import operator
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom.workloads import Buildable
from gradwire.testing.ranks import time_limit

_Number = TypeVar("_Number", int, float)

# The first backward has DDP's provisional buckets, the second the final ones; the others are timed to see
# how many steps there is time for, and which recipe to try with smaller buckets.
_NUM_WARM_UP_STEPS = 3
# Rows take turns this often, so that a slow minute of the machine is slow for all of them.
_STEPS_PER_TURN = 2
# Fewer pairs than these cannot rule chance out: see the verdict.
_MIN_STEPS, _MAX_STEPS = 8, 24
# No turn of a model that fits such a run takes this long: ranks that do are stuck.
TURN_LIMIT_S = 600.0


@dataclass(frozen=True)
class Entry:
    """What one row measures: plain DDP (None) or a recipe, with buckets of a size."""

    recipe: gradwire.Recipe | None
    bucket_mb: float | None
    """None is DDP's own default."""


@dataclass(frozen=True)
class Plan:
    """What all ranks measure together."""

    recipes: tuple[gradwire.Recipe | None, ...]
    workload: Buildable
    num_steps: int | None
    """Timed steps of each row; None for as many as `seconds` allow."""
    seconds: float
    bucket_mb: float | None
    small_bucket_mb: float | None
    """Buckets to try plain DDP and the best recipe with as well; None for not."""
    device: str = "cpu"


@dataclass
class Found:
    """What one rank found about one row. None stands for what cannot be known."""

    entry: Entry
    times_s: list[float] = field(default_factory=list)
    bytes_per_step: int | None = None
    num_messages: int | None = None
    wait_ms: float | None = None
    work_ms: float | None = None
    gradient_error: float | None = None


@dataclass
class Outcome:
    """What one rank found in all."""

    rows: list[Found]
    num_threads: int
    backend: str
    device: str
    gradient_bytes: int


class _Contender:
    """One row: its model and what is attached to that."""

    def __init__(self, plan: Plan, entry: Entry, group: dist.ProcessGroup, device: torch.device) -> None:
        torch.manual_seed(0)
        built = plan.workload.build().to(device)
        self.found = Found(entry)
        self.model = DistributedDataParallel(built.model, bucket_cap_mb=entry.bucket_mb, process_group=group)
        torch.manual_seed(1 + dist.get_rank())
        # Each rank its own batch; the weights are the same.
        self.built = replace(built, batch=plan.workload.build().to(device).batch)
        self.wire = None if entry.recipe is None else gradwire.attach(self.model, entry.recipe)
        if self.wire is not None and not self.wire.attached:
            raise RuntimeError(
                f"{entry.recipe} was not attached, so it cannot be measured: unset GRADWIRE_DISABLE"
            )
        self._device = device

    def step(self) -> float:
        """Seconds that one step takes; without an optimizer, whose time is the same for all rows."""
        begin = time.perf_counter()
        self.model.zero_grad()
        self.built.step_loss(self.model).backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin

    def gradients(self) -> Tensor:
        """All of them, as one vector."""
        return torch.cat([p.grad.flatten().double() for p in self.model.parameters() if p.grad is not None])

    def conclude(self, exact: Tensor) -> Found:
        """Add to the times what the wire counted, and how far its average is from the exact one."""
        if self.wire is not None:
            steps = self.wire.stats().steps
            buckets = steps[-1].buckets
            self.found.bytes_per_step = _total([b.bytes_sent for b in buckets])
            self.found.num_messages = _total([b.num_messages for b in buckets])
            self.found.wait_ms = _typical([_total([b.wait_ms for b in s.buckets]) for s in steps[2:]])
            self.found.work_ms = _typical([_total([b.work_ms for b in s.buckets]) for s in steps[2:]])
            norm = float(exact.norm())
            self.found.gradient_error = float((self.gradients() - exact).norm()) / norm if norm else None
            self.wire.detach()
        return self.found


def measure(rank: int, plan: Plan, on_progress: Callable[[int, int], None]) -> Outcome:
    """Time the plan's rows, taking turns; on every rank of the default group at once."""
    with time_limit(TURN_LIMIT_S):
        group, device = _open_group(plan.device)
        rows = [_Contender(plan, Entry(recipe, plan.bucket_mb), group, device) for recipe in plan.recipes]
    num_done = 0
    num_in_all = 0

    def take_turn(row: _Contender, num_steps: int) -> list[float]:
        nonlocal num_done
        with time_limit(TURN_LIMIT_S):
            dist.barrier()
            times_s = [row.step() for _ in range(num_steps)]
        num_done += num_steps
        on_progress(num_done, max(num_in_all, num_done))
        return times_s

    def warm_up(row: _Contender) -> float:
        # Of the slowest rank, so that all ranks draw the same conclusions.
        best_s = torch.tensor(min(take_turn(row, _NUM_WARM_UP_STEPS)[1:]), dtype=torch.float64)
        dist.all_reduce(best_s := best_s.to(_group_device()), dist.ReduceOp.MAX)
        return float(best_s)

    num_in_all = len(rows) * (_NUM_WARM_UP_STEPS + (plan.num_steps or _MAX_STEPS))
    costs_s = [warm_up(row) for row in rows]
    small_mb = plan.small_bucket_mb
    if (
        small_mb is not None
        and dist.get_world_size() > 1
        and gradient_bytes(rows[0].model) > small_mb * 2**20
    ):
        for recipe in (None, _best(plan.recipes, costs_s)):
            entry = Entry(recipe, small_mb)
            if entry not in [row.found.entry for row in rows]:
                rows.append(_Contender(plan, entry, group, device))
                costs_s.append(warm_up(rows[-1]))
    num_steps = plan.num_steps or max(_MIN_STEPS, min(_MAX_STEPS, int(plan.seconds / sum(costs_s))))
    num_in_all = len(rows) * (_NUM_WARM_UP_STEPS + num_steps)
    for turn, start in enumerate(range(0, num_steps, _STEPS_PER_TURN)):
        # The same order on all ranks, but another one each time: none always follows the same other.
        for row in random.Random(turn).sample(rows, k=len(rows)):
            row.found.times_s += take_turn(row, min(_STEPS_PER_TURN, num_steps - start))
    with time_limit(TURN_LIMIT_S):
        dist.barrier()
        exact = rows[0].gradients()
        found = [row.conclude(exact) for row in rows]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    num_bytes = gradient_bytes(rows[0].model)
    return Outcome(found, torch.get_num_threads(), dist.get_backend(group), name, num_bytes)


def gradient_bytes(model: DistributedDataParallel) -> int:
    """The size of what is averaged in a step."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _best(recipes: tuple[gradwire.Recipe | None, ...], costs_s: list[float]) -> gradwire.Recipe | None:
    ranked = sorted(zip(costs_s, range(len(recipes)), strict=True))
    communicating = [recipes[i] for _, i in ranked]
    return next((r for r in communicating if r is not None and r.exchange.communicates), None)


def _open_group(device: str) -> tuple[dist.ProcessGroup, torch.device]:
    """The group to average over: the default one, or an NCCL one beside it."""
    default = dist.group.WORLD
    assert default is not None
    if device == "cpu":
        return default, torch.device("cpu")
    num_devices = torch.cuda.device_count()
    where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())) % num_devices)
    torch.cuda.set_device(where)
    if dist.get_backend() == "nccl":
        return default, where
    if dist.get_world_size() > num_devices:
        # NCCL takes two ranks on one device only if they say that they are on different hosts.
        os.environ["NCCL_HOSTID"] = str(dist.get_rank())
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return dist.new_group(backend="nccl"), where


def _group_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _total(figures: list[_Number | None]) -> _Number | None:
    known = [figure for figure in figures if figure is not None]
    return functools.reduce(operator.add, known) if known and len(known) == len(figures) else None


def _typical(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None
