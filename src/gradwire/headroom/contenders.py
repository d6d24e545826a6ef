"""Inside a rank: the models that take turns, one for each row of a measurement."""

from __future__ import annotations

import functools
import math
import operator
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.ddp import wrap
from gradwire.headroom.contest import Contest, Entry, Found, Outcome
from gradwire.headroom.records import Row, ring_bytes
from gradwire.headroom.verdict import best_of, keeps_gradients
from gradwire.headroom.workloads import Built
from gradwire.ranks import time_limit

_Number = TypeVar("_Number", int, float)

# The first backward has DDP's provisional buckets, the second the final ones; the others are timed to see
# how many steps there is time for.
_NUM_WARM_UP_STEPS = 3
# Of recipes that could be recommended, to see which of them to try with smaller buckets.
_NUM_QUALIFYING_TURNS = 2
# Rows take turns this often, so that a slow minute of the machine is slow for all of them.
_STEPS_PER_TURN = 2
# Fewer pairs than these cannot rule chance out: see the verdict.
_MIN_STEPS, _MAX_STEPS = 8, 24
# No turn of a model that fits such a run takes this long: ranks that do are stuck.
TURN_LIMIT_S = 600.0


class _Contender:
    """One row: its model and what is attached to that."""

    def __init__(self, entry: Entry, built: Built, group: dist.ProcessGroup, device: torch.device) -> None:
        self.found = Found(entry)
        self.model = wrap(built.model, bucket_cap_mb=entry.bucket_mb, process_group=group)
        self.wire = None if entry.recipe is None else gradwire.attach(self.model, entry.recipe)
        if self.wire is not None and not self.wire.attached:
            raise RuntimeError(
                f"{entry.recipe} was not attached, so it cannot be measured: unset GRADWIRE_DISABLE"
            )
        self._built = built
        self._device = device

    def step(self) -> float:
        """Seconds that one step takes; without an optimizer, whose time is the same for all rows."""
        begin = time.perf_counter()
        self.model.zero_grad()
        self._built.step_loss(self.model).backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin

    def conclude(self) -> Found:
        """Add to the times what the wire counted, and detach it."""
        self.count()
        if self.wire is not None:
            steps = self.wire.stats().steps
            self.found.wait_ms = _typical([_total([b.wait_ms for b in s.buckets]) for s in steps[2:]])
            self.found.work_ms = _typical([_total([b.work_ms for b in s.buckets]) for s in steps[2:]])
            self.wire.detach()
        return self.found

    def count(self) -> None:
        """Note what a step sends."""
        if self.wire is not None:
            steps = self.wire.stats().steps
            # Of the two last, as recipes may send one thing in even steps and another in odd ones.
            last = [bucket for step in steps[-2:] for bucket in step.buckets]
            sent, messages = _total([b.bytes_sent for b in last]), _total([b.num_messages for b in last])
            self.found.bytes_per_step = None if sent is None else sent // len(steps[-2:])
            self.found.num_messages = None if messages is None else messages // len(steps[-2:])


class _Arena:
    """Makes contenders that differ in nothing but their entries."""

    def __init__(self, contest: Contest) -> None:
        self._workload = contest.workload
        self._group, self._device = _open_group(contest.device)
        # Each rank its own batch; DDP gives all ranks the weights of the first.
        torch.manual_seed(1 + dist.get_rank())
        self._batch = self._build().batch

    def make(self, entry: Entry) -> _Contender:
        torch.manual_seed(0)
        built = replace(self._build(), batch=self._batch)
        return _Contender(entry, built, self._group, self._device)

    def _build(self) -> Built:
        return self._workload.build().to(self._device)

    def describe(self, rows: list[_Contender]) -> Outcome:
        is_cuda = self._device.type == "cuda"
        return Outcome(
            rows=[row.conclude() for row in rows],
            num_threads=torch.get_num_threads(),
            backend=dist.get_backend(self._group),
            device=torch.cuda.get_device_name(self._device) if is_cuda else self._device.type,
            num_parameters=sum(p.numel() for p in rows[0].model.parameters() if p.requires_grad),
            gradient_bytes=gradient_bytes(rows[0].model),
        )


def measure(contest: Contest, on_progress: Callable[[int, int], None]) -> Outcome:
    """Time the contest's rows, taking turns; on every rank of the default group at once."""
    with time_limit(TURN_LIMIT_S):
        arena = _Arena(contest)
        rows = [arena.make(Entry(recipe, contest.bucket_mb)) for recipe in contest.rows]
    num_done = 0
    num_in_all = 0

    def take_turn(row: _Contender, num_steps: int, turn: int) -> list[float]:
        nonlocal num_done
        # The same dropout for all rows, so that they do the same and their gradients can be compared.
        torch.manual_seed(turn * dist.get_world_size() + dist.get_rank())
        with time_limit(TURN_LIMIT_S):
            dist.barrier()
            times_s = [row.step() for _ in range(num_steps)]
        num_done += num_steps
        on_progress(num_done, max(num_in_all, num_done))
        return times_s

    def warm_up(row: _Contender) -> list[float]:
        return _largest(take_turn(row, _NUM_WARM_UP_STEPS - 1, 0))

    def qualify() -> gradwire.Recipe | None:
        """The recipe that the verdict would name by now; those that it could name take more turns first."""
        plain_bytes = ring_bytes(gradient_bytes(rows[0].model), dist.get_world_size())
        recipes = range(1, len(rows) - 1)  # between plain DDP and no communication
        able = [i for i in recipes if keeps_gradients(_row_so_far(rows[i], warm_s[i]), plain_bytes)]
        for turn in range(_NUM_QUALIFYING_TURNS if len(able) > 1 else 0):
            for i in random.Random(turn).sample(able, k=len(able)):
                warm_s[i] += _largest(take_turn(rows[i], _STEPS_PER_TURN, 0))
        recipe_of = {_row_so_far(rows[i], warm_s[i]): rows[i].found.entry.recipe for i in able}
        best = best_of(recipe_of, plain_bytes)
        return None if best is None else recipe_of[best]

    num_in_all = len(rows) * (_NUM_WARM_UP_STEPS + (contest.num_steps or _MAX_STEPS))
    for row in rows:
        take_turn(row, 1, 0)
        # Plain DDP comes first, and waits with its gradients for the others.
        row.found.gradient_error = _relative_error(row.model, rows[0].model)
    warm_s = [warm_up(row) for row in rows]
    small_mb = contest.small_bucket_mb
    if (
        small_mb is not None
        and dist.get_world_size() > 1
        and gradient_bytes(rows[0].model) > small_mb * 2**20
    ):
        for recipe in (None, qualify()):
            entry = Entry(recipe, small_mb)
            if entry not in [row.found.entry for row in rows]:
                rows.append(arena.make(entry))
                take_turn(rows[-1], 1, 0)
                # What it sends is the same, but for where blocks begin.
                (same,) = [row for row in rows[:-1] if row.found.entry.recipe == recipe]
                rows[-1].found.gradient_error = same.found.gradient_error
                warm_s.append(warm_up(rows[-1]))
    num_affordable = contest.seconds / sum(map(min, warm_s))
    num_steps = contest.num_steps or int(max(_MIN_STEPS, min(_MAX_STEPS, num_affordable)))
    num_in_all = num_done + len(rows) * num_steps
    for turn, start in enumerate(range(0, num_steps, _STEPS_PER_TURN), start=1):
        # The same order on all ranks, but another one each time: none always follows the same other.
        for row in random.Random(turn).sample(rows, k=len(rows)):
            row.found.times_s += take_turn(row, min(_STEPS_PER_TURN, num_steps - start), turn)
    with time_limit(TURN_LIMIT_S):
        dist.barrier()
        return arena.describe(rows)


def _relative_error(model: nn.Module, exact: nn.Module) -> float | None:
    """Of all gradients together, in the 2-norm; one parameter at a time, as models may be large."""
    apart = whole = 0.0
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        if ours.grad is not None and theirs.grad is not None:
            apart += _square(ours.grad - theirs.grad)
            whole += _square(theirs.grad)
    return math.sqrt(apart / whole) if whole and math.isfinite(apart) else None


def _square(gradient: torch.Tensor) -> float:
    """The sum of its squares, in fp64, without a copy in fp64."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def gradient_bytes(model: nn.Module) -> int:
    """The size of what is averaged in a step."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _row_so_far(contender: _Contender, times_s: list[float]) -> Row:
    """What is known of a recipe before it has been measured."""
    contender.count()
    found = contender.found
    (sent,) = _largest([float(found.bytes_per_step or 0)])
    times_ms = tuple(1e3 * time_s for time_s in times_s)
    return Row(str(found.entry.recipe), times_ms, int(sent), gradient_error=found.gradient_error)


def _largest(figures: list[float]) -> list[float]:
    """Each the largest of all ranks: a step ends with the slowest, and all draw the same conclusions."""
    everyones = torch.tensor(figures, dtype=torch.float64, device=_group_device())
    dist.all_reduce(everyones, dist.ReduceOp.MAX)
    return everyones.tolist()


def _open_group(device: str) -> tuple[dist.ProcessGroup, torch.device]:
    """The group to average over: the default one, or an NCCL one beside it."""
    default = dist.group.WORLD
    assert default is not None
    if device == "cpu":
        return default, torch.device("cpu")
    where = local_gpu(dist.get_rank(), dist.get_world_size())
    torch.cuda.set_device(where)
    return default if dist.get_backend() == "nccl" else dist.new_group(backend="nccl"), where


def local_gpu(rank: int, world_size: int) -> torch.device:
    """The GPU of a rank, which others may use too. To be called before any NCCL group is made."""
    index, num_sharing, num_devices = rank, world_size, torch.cuda.device_count()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # this machine may be one of several
        index, num_sharing = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if num_sharing > num_devices:
        # NCCL takes two ranks on one device only if they say that they are on different hosts.
        os.environ.setdefault("NCCL_HOSTID", str(rank))
        if num_sharing == world_size:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return torch.device("cuda", index % num_devices)


def _group_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _total(figures: list[_Number | None]) -> _Number | None:
    known = [figure for figure in figures if figure is not None]
    return functools.reduce(operator.add, known) if known and len(known) == len(figures) else None


def _typical(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None
