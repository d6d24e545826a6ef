"""The invariants of a sharded model that a recipe averages, checked on real ranks."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.recipes import Recipe, scattered
from gradwire.recipes import recipe as parse_recipe
from gradwire.sharded import attach, replica_mesh
from gradwire.testing.accuracy import Accuracy, Average, Bounds, Gradients, require
from gradwire.testing.case_runs import Report, changes, require_choice, run_cases
from gradwire.testing.expectations import expectation_of
from gradwire.testing.invariants import device_of_rank, require_identical
from gradwire.testing.values import draw_values, exact_averages

_BLOCKS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"weight": (37, 41), "bias": (37,)},
    {"conv": (8, 3, 3, 3), "gain": (1,)},
    {"table": (10, 6)},
)
_NUM_STEPS = 5
_NUM_SKEWED_STEPS = 50
_RESUMED_AT = 2


@dataclass(frozen=True)
class ShardedCase:
    """One way to train a sharded model. The defaults are the base case."""

    reshards: bool = True
    """Parameters are freed after the forward pass, and gathered again."""
    micro_batches: int = 1
    """Gradients of so many backward passes are accumulated."""
    native: bool = True
    """With replicas: sharded over a mesh of two dimensions. If False, `attach` is told the replicas."""
    skew: bool = False
    """Ranks arrive at different times, over fifty steps."""
    resume: bool = False
    """The last steps are trained again, by another model that has loaded the state."""

    def __str__(self) -> str:
        return changes(self)


def check_sharded(
    recipe: str | Recipe,
    *,
    tolerance: float | None = None,
    world_size: int = 2,
    replicas: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    case_timeout: float = 60.0,
) -> Report:
    """Train a sharded model with ``recipe`` in every way, and report case by case.

    After each step, gradients must be finite, within the recipe's bound of the exact mean, neither too large
    nor too small as a whole (see `check_hook`), and the same in all replicas bit for bit. A resumed run must
    have the bits of one that was not stopped.

    Args:
        recipe: a recipe, or its text.
        tolerance: the largest error, as in `check_hook`. By default it follows from the recipe.
        world_size: the number of ranks.
        replicas: the number of replicas; each has ``world_size / replicas`` shards. With 1, the recipe
            reduces over shards (FSDP2); with more, it averages over replicas (HSDP).
        device: ``"cuda"`` trains on the GPUs of this machine, over NCCL. Ranks may share one.
        case_timeout: seconds after which a case counts as hung.

    Raises ValueError for an unknown recipe, one that cannot be scattered, or a number of replicas that does
    not divide the number of ranks; and without a tolerance for a recipe whose errors depend on the gradients.

    Example::

        report = check_sharded("int4", world_size=4, replicas=2)
        assert report.ok, report
    """
    chosen = parse_recipe(recipe)
    require_choice("device", device, ("cpu", "cuda"))
    if replicas < 1 or world_size % replicas:
        raise ValueError(f"{world_size} ranks cannot be {replicas} replicas of equal size")
    bounds = bounds_of(chosen, tolerance, world_size, replicas)
    cases = [ShardedCase(), ShardedCase(reshards=False), ShardedCase(micro_batches=3)]
    cases += [ShardedCase(native=False)] if replicas > 1 else []
    cases += [ShardedCase(skew=True), ShardedCase(resume=True)]
    results = run_cases(_check, cases, world_size, case_timeout, (chosen, bounds, replicas, device))
    kind = "HSDP" if replicas > 1 else "FSDP2"
    return Report(f"{kind} with {str(chosen)!r}", world_size, results)


def bounds_of(recipe: Recipe, tolerance: float | None, world_size: int, replicas: int) -> Bounds:
    """Return the limits for the errors of gradients, with the arguments of `check_sharded`."""
    own = expectation_of(scattered(recipe) if replicas == 1 else recipe, world_size)
    return Bounds(
        tolerance=own.tolerance_or(tolerance, str(recipe)),
        floor=own.floor,
        feedback=own.feedback,
        num_roundings=1,
        residual_unit=None,
        unbiased=own.unbiased,
        keeps_size=True,
    )


class _Block(nn.Module):
    """Parameters whose gradients are the batch itself."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, total: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for name, parameter in self.named_parameters():
            total = total + (parameter * batch[name]).sum()
        return total


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(shapes) for shapes in _BLOCKS)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        total = next(iter(batch.values())).new_zeros(())
        for block in self.blocks:
            total = block(total, batch)
        return total


def _check(
    rank: int, case: ShardedCase, recipe: Recipe, bounds: Bounds, num_replicas: int, device_type: str
) -> float:
    """Train in the way of ``case``, inside a rank, and return the largest deviation."""
    device = device_of_rank(device_type)
    mesh = _mesh(num_replicas, device)
    draw, pauses = functools.partial(_draw, rank, device), random.Random(rank)
    accuracy = Accuracy(bounds, torch.float32, dist.get_world_size())
    results: list[Gradients] = []
    num_steps = _NUM_SKEWED_STEPS if case.skew else _NUM_STEPS
    state: dict[str, Any] = {}
    model, more = _sharded(case, mesh, num_replicas)
    with attach(model, recipe, **more) as wire:
        for step in range(num_steps):
            if case.skew:
                time.sleep(pauses.random() * 0.005)
            if case.resume and step == _RESUMED_AT:
                state = wire.state_dict()
            _backward(model, draw, step, case.micro_batches)
            results.append({name: _whole(p).cpu() for name, p in model.named_parameters()})
            accuracy.check(f"step {step}", results[-1], _exact(draw, step, case.micro_batches), None)
    require_identical(results, _checks_group())
    if case.resume:
        model, more = _sharded(case, mesh, num_replicas)
        with attach(model, recipe, **more) as wire:
            wire.load_state_dict(state)
            for step in range(_RESUMED_AT, num_steps):
                _backward(model, draw, step, case.micro_batches)
                for name, parameter in model.named_parameters():
                    before = results[step][name]
                    is_same = before is not None and torch.equal(_whole(parameter).cpu(), before)
                    require(is_same, f"step {step}: {name} is not what a run without a stop has")
    return accuracy.deviation


def _sharded(case: ShardedCase, mesh: DeviceMesh, num_replicas: int) -> tuple[Any, dict[str, Any]]:
    # Imported here, since it takes a second.
    from torch.distributed.fsdp import fully_shard

    model: Any = _Model().to(mesh.device_type)
    over = mesh if case.native and num_replicas > 1 else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=over, reshard_after_forward=case.reshards)
    fully_shard(model, mesh=over, reshard_after_forward=case.reshards)
    return model, {} if over is mesh or num_replicas == 1 else {"replicas": mesh["replicate"]}


def _backward(model: Any, draw: Callable[[int], dict[str, Tensor]], step: int, num_micro: int) -> None:
    model.zero_grad()
    for micro in range(num_micro):
        model.set_requires_all_reduce(micro == num_micro - 1)
        model(draw(step + 1000 * micro)).backward()


def _whole(parameter: nn.Parameter) -> Tensor:
    gradient: Any = parameter.grad
    whole: Tensor = gradient.full_tensor()
    return whole


def _draw(rank: int, device: torch.device, step: int) -> dict[str, Tensor]:
    """Return one rank's gradients of one step, by the last part of their names."""
    shapes = {name: shape for block in _BLOCKS for name, shape in block.items()}
    return {name: values.to(device) for name, values in draw_values(shapes, rank, step).items()}


def _exact(draw: Callable[[int], dict[str, Tensor]], step: int, num_micro: int) -> Average:
    """Return the exact mean of a step, from this rank's own gradients; collective."""
    own = [draw(step + 1000 * micro) for micro in range(num_micro)]
    totals = {
        f"blocks.{number}.{name}": torch.stack([each[name].cpu().double() for each in own]).sum(0)
        for number, shapes in enumerate(_BLOCKS)
        for name in shapes
    }
    (exact,) = exact_averages([totals], "mean", _checks_group())
    return exact


@functools.cache
def _checks_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


@functools.cache
def _mesh(num_replicas: int, device: torch.device) -> DeviceMesh:
    """Return a mesh of replicas and shards, of groups for this device; collective."""
    return replica_mesh(num_replicas, device, "gloo" if device.type == "cpu" else "nccl")
