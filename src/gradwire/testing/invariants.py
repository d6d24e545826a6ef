"""The invariants of the hook contract, checked from inside a rank."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.ddp import Wire, attach, hook_name, make_ddp
from gradwire.recipes import Recipe
from gradwire.testing.accuracy import Accuracy, Average, Bounds, Gradients, Values, require, with_momentum
from gradwire.testing.expectations import Expect
from gradwire.testing.values import exact_averages
from gradwire.testing.workload import (
    NONFINITE_STEP,
    Net,
    TrainingBatch,
    exact_results,
    make_batches,
    num_steps,
)
from gradwire.torch_private import ddp_facts

if TYPE_CHECKING:
    from gradwire.testing.matrix import Case


@dataclass(frozen=True)
class Subject:
    """The hook that is checked, and how."""

    hook: Recipe | Callable[..., Any]
    state_factory: Callable[[dist.ProcessGroup], Any]
    expect: Expect
    via: str
    device: str
    bounds: Bounds

    @property
    def name(self) -> str:
        return str(self.hook) if isinstance(self.hook, Recipe) else hook_name(self.hook)


@dataclass(frozen=True)
class _Observations:
    """The gradients and figures that one rank has seen in training."""

    gradients: list[Gradients]
    """After each of its steps."""
    residuals: list[Values]
    """After each step of any rank; empty for a hook whose residuals are not known."""
    velocities: list[Values]
    """After each step of any rank, like the residuals."""

    def add_states(self, wire: Wire | None, num_steps: int = 1) -> None:
        """Add the states that a wire has after ``num_steps`` steps."""
        state = None if wire is None else wire.state_dict()
        for found, name in ((self.residuals, "residual"), (self.velocities, "velocity")):
            found.extend([{} if state is None else values_of(state, name)] * num_steps)


def check_invariants(subject: Subject, case: Case) -> float:
    """Train one model in the way of ``case`` and return the largest deviation. Raises if anything is off."""
    device = device_of_rank(subject.device)
    group, checks = groups_of_rank(case.subgroup, device)
    rank, size = group.rank(), group.size()
    dtype: torch.dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    net = Net().to(device, dtype)
    batches = make_batches(case, rank, size, device)
    num_steps_of_any = num_steps(case, size)
    expected = exact_results(net, batches, num_steps_of_any, subject.expect, checks)

    model = make_ddp(
        net,
        process_group=group,
        bucket_cap_mb=0.004 if case.buckets == "many" else 25,
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        static_graph=case.graph == "static",
        find_unused_parameters=case.graph == "find_unused",
    )
    with _installed(subject, model) as wire:
        run = _train(model, wire, case, batches, rank, num_steps_of_any)

    _check_num_buckets(model, case)
    held_back, parameters = [], dict(net.named_parameters())
    if subject.bounds.residual_unit is not None:
        held_back = average_values(run.residuals, parameters, subject.expect, checks)
    if momentum := subject.bounds.momentum:
        velocities = average_values(run.velocities, parameters, subject.expect, checks)
        expected = [with_momentum(*pair, momentum) for pair in zip(expected, velocities, strict=False)]
    accuracy = Accuracy(subject.bounds, dtype, size)
    for step, gradients in enumerate(run.gradients):
        where = f"step {step}"
        if case.nonfinite and step == NONFINITE_STEP:
            values = torch.cat([g.flatten() for g in gradients.values() if g is not None])
            vanished = subject.expect != "local" and bool(values.isfinite().all())
            require(not vanished, f"{where}: the infinite gradient has vanished")
            accuracy.skip()
            continue
        held = (held_back[step], held_back[step + 1]) if held_back else None
        accuracy.check(where, gradients, expected[step], held)
    if subject.expect != "local":
        require_identical(run.gradients, checks, NONFINITE_STEP if case.nonfinite else None)
    return accuracy.deviation


def device_of_rank(kind: str) -> torch.device:
    """Return the device of this rank's model, and make it the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    # NCCL takes two ranks on one device only if they say that they are on different hosts.
    os.environ["NCCL_HOSTID"] = str(dist.get_rank())
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device(kind, dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@functools.cache  # once for all cases: the ranks end with the first case that breaks
def groups_of_rank(subgroup: bool, device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the model's process group, and a Gloo group of the same ranks for the checks. Collective."""
    size = dist.get_world_size()
    backend = "gloo" if device.type == "cpu" else "nccl"
    # Every other rank, so that ranks in the group and in the world differ.
    parts = [list(range(0, size, 2)), list(range(1, size, 2))] if subgroup else [list(range(size))]
    mine = None
    for ranks in filter(None, parts):
        pair = dist.new_group(ranks, backend=backend), dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = pair
    assert mine is not None
    return mine


@contextlib.contextmanager
def _installed(subject: Subject, model: Any) -> Iterator[Wire | None]:
    """Install the hook in a model; yield the wire, if there is one."""
    if isinstance(subject.hook, Recipe):
        with attach(model, subject.hook) as wire:
            yield wire
    elif subject.via == "attach":
        with attach(model, subject.hook, state=subject.state_factory(model.process_group)) as wire:
            yield wire
    else:
        model.register_comm_hook(subject.state_factory(model.process_group), subject.hook)
        yield None


def _train(
    model: Any, wire: Wire | None, case: Case, batches: list[TrainingBatch], rank: int, num_steps: int
) -> _Observations:
    pauses = random.Random(rank)
    run = _Observations([], [], [])
    with model.join() if case.join else contextlib.nullcontext():
        for batch in batches:
            model.zero_grad()
            if case.skew:
                time.sleep(pauses.random() * 0.01)
            last = len(batch.images) - 1
            generators_before = _generator_states()
            for i in range(len(batch.images)):
                one = TrainingBatch([batch.images[i]], batch.use_sometimes, batch.factor)
                with model.no_sync() if i < last else contextlib.nullcontext():
                    next(one.losses(model)).backward()
            require(
                generators_before == _generator_states(),
                "the hook has moved the global random generator",
            )
            run.gradients.append(
                {
                    name: None if p.grad is None else p.grad.detach().cpu().clone()
                    for name, p in model.module.named_parameters()
                }
            )
            run.add_states(wire)
    # A rank that has run out of data has joined one more step.
    if wire is not None and len(batches) < num_steps:
        run.add_states(wire, num_steps - len(batches))
    return run


def values_of(state: Mapping[str, Any], kind: str) -> Values:
    """Return this rank's residuals or velocities, by parameter, from the state of its wire."""
    found: Values = {}
    for key, tensors in next(iter(state["memory"].values())).items():
        if key.startswith(f"{kind}:"):
            for name, values in tensors.items():
                found[name] = values.cpu().double() + found.get(name, 0.0)
    return found


def average_values(
    run: list[Values], parameters: Mapping[str, Tensor], expect: Expect, group: dist.ProcessGroup
) -> list[Average]:
    """Return what ranks hold on average before the first step and after each. Collective."""
    none = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items() if p.numel()}
    return exact_averages([none, *({**none, **after} for after in run)], expect, group)


def _generator_states() -> list[bytes]:
    states = [torch.random.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [bytes(state.numpy()) for state in states]


def _check_num_buckets(model: Any, case: Case) -> None:
    data = ddp_facts(model)
    sizes = str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"])
    num_buckets = len([size for size in sizes.split(",") if size.strip()])
    wanted = num_buckets >= 3 if case.buckets == "many" else num_buckets == 1
    # find_unused_parameters keeps the first buckets, which a size cap splits all the same.
    require(wanted, f"this case should have {case.buckets} bucket(s), but DDP made {sizes}")


def require_identical(
    seen: list[Gradients], group: dist.ProcessGroup, nonfinite_step: int | None = None
) -> None:
    """Raise AssertionError if ranks have different bits in any step but the nonfinite one. Collective."""
    hashes = []
    for step, gradients in enumerate(seen):
        digest = hashlib.sha256()
        for grad in gradients.values():
            if grad is not None and step != nonfinite_step:
                digest.update(grad.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        hashes.append(digest.hexdigest())
    everyone: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyone, hashes, group=group)
    for step in range(min(map(len, everyone))):
        if len({ranks_hashes[step] for ranks_hashes in everyone}) > 1:
            raise AssertionError(f"step {step}: ranks have different gradients")
