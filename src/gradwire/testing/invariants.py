"""What must hold after every step, checked from inside a rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.ddp import attach, hook_name, wrap
from gradwire.recipes import Recipe

if TYPE_CHECKING:
    from gradwire.testing.matrix import Case

# Step 0 runs before DDP rebuilds its buckets; with a static graph it does so after step 1.
_NUM_STEPS = 6
_NUM_SKEWED_STEPS = 50
_NONFINITE_STEP = 3
_NUM_MICRO_BATCHES = 3
# A result in bf16 is within half of a last place, 2^-9, of the exact one.
_BF16_ROUNDING = 2.0**-8

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Subject:
    """What is being checked."""

    hook: Recipe | Callable[..., Any]
    state_factory: Callable[[dist.ProcessGroup], Any]
    tolerance: float
    expect: str
    via: str
    device: str
    floor: float
    feedback: bool

    @property
    def name(self) -> str:
        return str(self.hook) if isinstance(self.hook, Recipe) else hook_name(self.hook)


class Net(nn.Module):
    """A small model with the parameters that hooks stumble over."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(72, 37)
        self.shared = nn.Linear(37, 37)
        self.sometimes = nn.Linear(37, 37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 37))
        self.silent = nn.Linear(37, 3)  # its gradient is zero
        self.head = nn.Linear(37, 3)

    def forward(self, images: Tensor, use_sometimes: bool) -> Tensor:
        x = self.conv(images).relu().flatten(1)
        x = self.first(x).tanh()
        x = self.shared(self.shared(x)).tanh()
        if use_sometimes:
            x = x + self.sometimes(x)
        x = self.frozen(x) * self.gain + self.empty.sum()
        output: Tensor = self.head(x) + 0 * self.silent(x)
        return output


@dataclass(frozen=True)
class _Batch:
    images: list[Tensor]
    """One tensor per micro-batch."""
    use_sometimes: bool
    factor: float

    def losses(self, model: Any) -> Iterator[Tensor]:
        for images in self.images:
            yield model(images, self.use_sometimes).square().mean() * self.factor


def check_invariants(subject: Subject, case: Case) -> float:
    """Train one model in the way of ``case``; return the largest deviation, raise if anything is off."""
    device = _device(subject.device)
    group, checks = _groups(case.subgroup, device)
    rank, size = group.rank(), group.size()
    torch.manual_seed(0)
    net = Net().to(device, getattr(torch, case.dtype))
    batches = _batches(case, rank, size, device)
    num_steps = max(_num_batches(case, r, size) for r in range(size))
    expected = _expected(net, batches, num_steps, subject.expect, checks)

    model = wrap(
        net,
        process_group=group,
        bucket_cap_mb=0.004 if case.buckets == "many" else 25,
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        static_graph=case.graph == "static",
        find_unused_parameters=case.graph == "find_unused",
    )
    with _installed(subject, model):
        seen = _train(model, case, batches, rank)

    _check_num_buckets(model, case)
    deviation = largest_ever = 0.0
    have_total: dict[str, Tensor] = {}
    want_total: dict[str, Tensor] = {}
    for step, gradients in enumerate(seen):
        where = f"step {step}"
        if case.nonfinite and step == _NONFINITE_STEP:
            values = torch.cat([g.flatten() for g in gradients.values() if g is not None])
            vanished = subject.expect != "local" and bool(values.isfinite().all())
            _require(not vanished, f"{where}: the infinite gradient has vanished")
            continue
        have, want = _present(where, gradients, expected[step])
        largest = max(float(value.abs().max()) for value in want.values())
        if subject.feedback:
            # What one step leaves out comes later: sums over steps agree.
            _add_up(have_total, have)
            _add_up(want_total, want)
            have, want, largest_ever = have_total, want_total, max(largest, largest_ever)
            largest = largest_ever
        deviation = max(deviation, _compare(subject, case, where, have, want, largest))
    if subject.expect != "local":
        _check_identical(seen, checks, case)
    return deviation


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    # NCCL takes two ranks on one device only if they say that they are on different hosts.
    os.environ["NCCL_HOSTID"] = str(dist.get_rank())
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device(kind, dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@functools.cache  # once for all cases: the ranks end with the first case that breaks
def _groups(subgroup: bool, device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The model's process group, and a Gloo group of the same ranks for the checks."""
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


def _num_batches(case: Case, rank: int, size: int) -> int:
    num_steps = _NUM_SKEWED_STEPS if case.skew else _NUM_STEPS
    return num_steps + int(case.join and rank == size - 1)


def _batches(case: Case, rank: int, size: int, device: torch.device) -> list[_Batch]:
    # The rank in the world, so that subgroups have different data.
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = []
    for step in range(_num_batches(case, rank, size)):
        # DDP learns a static graph in its first backward, and asserts that this one synchronises.
        accumulates = case.no_sync and not (case.graph == "static" and step == 0)
        images = [
            torch.randn(4, 3, 5, 5, generator=generator)
            .to(device, getattr(torch, case.dtype))
            .to(memory_format=torch.channels_last)
            for _ in range(_NUM_MICRO_BATCHES if accumulates else 1)
        ]
        # In turn: used by all ranks, by none, by the first.
        turn = step % 3 if case.graph == "find_unused" else 0
        use_sometimes = turn == 0 or (turn == 2 and rank == 0)
        infinite = case.nonfinite and step == _NONFINITE_STEP and rank == size - 1
        batches.append(_Batch(images, use_sometimes, float("inf") if infinite else 1.0))
    return batches


def _expected(
    net: nn.Module, batches: list[_Batch], num_steps: int, expect: str, group: dist.ProcessGroup
) -> list[Gradients]:
    """What the ranks' own gradients of each step should become, found without DDP and in fp64."""
    local = copy.deepcopy(net)
    named = list(local.named_parameters())
    rows = []
    for step in range(num_steps):
        local.zero_grad()
        for loss in batches[step].losses(local) if step < len(batches) else ():
            loss.backward()
        used = torch.tensor([float(p.grad is not None) for _, p in named], dtype=torch.float64)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in named]
        rows.append(torch.cat([grad.cpu().double().flatten() for grad in grads] + [used]))
    own = torch.stack(rows)
    total = own.clone()
    dist.all_reduce(total, group=group)  # one for all, since there are many steps and parameters
    # DDP leaves a gradient None only if no rank has used the parameter.
    used_by_any = total[:, -len(named) :] > 0
    if expect == "mean":
        total /= group.size()
    values = (own if expect == "local" else total)[:, : -len(named)].split([p.numel() for _, p in named], 1)
    return [
        {
            name: value[step].view(p.shape) if any_used else None
            for (name, p), value, any_used in zip(named, values, used_by_any[step], strict=True)
        }
        for step in range(num_steps)
    ]


@contextlib.contextmanager
def _installed(subject: Subject, model: Any) -> Iterator[None]:
    if isinstance(subject.hook, Recipe):
        with attach(model, subject.hook):
            yield
    elif subject.via == "attach":
        with attach(model, subject.hook, state=subject.state_factory(model.process_group)):
            yield
    else:
        model.register_comm_hook(subject.state_factory(model.process_group), subject.hook)
        yield


def _train(model: Any, case: Case, batches: list[_Batch], rank: int) -> list[Gradients]:
    pauses = random.Random(rank)
    seen = []
    with model.join() if case.join else contextlib.nullcontext():
        for batch in batches:
            model.zero_grad()
            if case.skew:
                time.sleep(pauses.random() * 0.01)
            last = len(batch.images) - 1
            generators_before = _generator_states()
            for i in range(len(batch.images)):
                one = _Batch([batch.images[i]], batch.use_sometimes, batch.factor)
                with model.no_sync() if i < last else contextlib.nullcontext():
                    next(one.losses(model)).backward()
            _require(
                generators_before == _generator_states(),
                "the hook has moved the global random generator",
            )
            seen.append(
                {
                    name: None if p.grad is None else p.grad.detach().cpu().clone()
                    for name, p in model.module.named_parameters()
                }
            )
    return seen


def _generator_states() -> list[bytes]:
    states = [torch.random.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [bytes(state.numpy()) for state in states]


def _check_num_buckets(model: Any, case: Case) -> None:
    data = model._get_ddp_logging_data()
    sizes = str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"])
    num_buckets = len([size for size in sizes.split(",") if size.strip()])
    wanted = num_buckets >= 3 if case.buckets == "many" else num_buckets == 1
    # find_unused_parameters keeps the first buckets, which a size cap splits all the same.
    _require(wanted, f"this case should have {case.buckets} bucket(s), but DDP made {sizes}")


def _present(
    where: str, gradients: Gradients, expected: Gradients
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients there are and those there should be, but empty ones; raise for one too many or few."""
    for name, want in expected.items():
        have = gradients[name]
        _require(
            (want is None) == (have is None),
            f"{where}: {name}.grad is {'None' if have is None else 'a tensor'}, expected "
            f"{'None, since no rank used it' if want is None else 'a tensor'}",
        )
        if have is not None:
            _require(bool(have.isfinite().all()), f"{where}: {name}.grad is not finite")
    return (
        {name: have.double() for name, have in gradients.items() if have is not None and have.numel()},
        {name: want for name, want in expected.items() if want is not None and want.numel()},
    )


def _add_up(totals: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value


def _compare(
    subject: Subject,
    case: Case,
    where: str,
    gradients: dict[str, Tensor],
    expected: dict[str, Tensor],
    largest: float,
) -> float:
    """The largest error of any parameter's gradient, relative to its largest, or to a part of the model's."""
    tolerance = subject.tolerance + (_BF16_ROUNDING if case.dtype == "bfloat16" else 0.0)
    deviation = 0.0
    for name, want in expected.items():
        own_largest = 0.0 if subject.feedback else float(want.abs().max())
        error = float((gradients[name] - want).abs().max()) / max(own_largest, subject.floor * largest)
        _require(
            error <= tolerance,
            f"{where}: {name}.grad is off by {error:.3g} of its largest value, allowed {tolerance:.3g}",
        )
        deviation = max(deviation, error)
    return deviation


def _check_identical(seen: list[Gradients], group: dist.ProcessGroup, case: Case) -> None:
    hashes = []
    for step, gradients in enumerate(seen):
        digest = hashlib.sha256()
        for grad in gradients.values():
            if grad is not None and not (case.nonfinite and step == _NONFINITE_STEP):
                digest.update(grad.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        hashes.append(digest.hexdigest())
    everyone: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyone, hashes, group=group)
    for step in range(min(map(len, everyone))):
        if len({ranks_hashes[step] for ranks_hashes in everyone}) > 1:
            raise AssertionError(f"step {step}: ranks have different gradients")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
