"""Measure the costs of recipes besides their bytes: two ranks on this machine average one bucket."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.ddp import make_ddp
from gradwire.headroom import ALLREDUCE, Machine, parse_json, read_field, read_number, read_text, read_whole
from gradwire.planner.cost import Costs
from gradwire.planner.messages import measure_messages
from gradwire.ranks import run_ranks, send_message
from gradwire.telemetry import BucketStats

# Number of square matrices, and their side: DDP's bucket of 25 MB, and an almost empty one. Matrices,
# because most parameters are.
_LARGE, _SMALL = (25, 512), (1, 32)
_NUM_STEPS = {_LARGE: 12, _SMALL: 60}
_NUM_RANKS = 2
_TIMEOUT_S = 600.0
_SCHEMA_VERSION = 3
# Above every cost in a calibration, in ms or ns.
_MAX_COST = 1e9


@dataclass(frozen=True)
class Calibration:
    """The costs of each recipe on one machine."""

    machine: str
    torch_version: str
    costs: dict[str, Costs]
    """Costs by recipe; ``allreduce`` is plain DDP."""
    num_cores: int
    load_average: float | None = None
    """Load average of the minute before; None if the system does not say."""

    @property
    def was_disturbed(self) -> bool:
        """True if other processes left the two ranks less than one core together."""
        return self.load_average is not None and self.load_average > self.num_cores - _NUM_RANKS / 2

    def costs_of(self, recipe: str) -> Costs:
        """Return the costs of a recipe; ValueError if it was not calibrated."""
        if recipe not in self.costs:
            raise ValueError(
                f"the calibration has no {recipe!r}, only {', '.join(self.costs)}: calibrate again with all "
                "recipes that you plan"
            )
        return self.costs[recipe]

    def to_json(self) -> str:
        """Return the calibration as JSON, for `from_json`."""
        fields = dataclasses.asdict(self)
        return json.dumps({"calibration_version": _SCHEMA_VERSION, **fields}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Read back what `to_json` of this version wrote. Raises ValueError for anything else."""
        try:
            try:
                data = parse_json(text)
            except ValueError as error:
                raise ValueError(f"it is not JSON: {error}") from None
            version = read_field(data, "calibration_version", int)
            if version != _SCHEMA_VERSION:
                raise ValueError(
                    f"another gradwire wrote it: its version is {version}, not {_SCHEMA_VERSION}"
                )
            figures = read_field(data, "costs", dict)
            return cls(
                machine=read_text(data, "machine"),
                torch_version=read_text(data, "torch_version"),
                costs={name: _read_costs(figures, name) for name in figures},
                num_cores=read_whole(data, "num_cores", 1, 1_000_000),
                load_average=read_number(data, "load_average", 0, 1e9, or_null=True),
            )
        except ValueError as error:
            raise ValueError(f"not a calibration of this gradwire: {error}") from None


def _read_costs(figures: dict[str, object], name: str) -> Costs:
    costs, names = read_field(figures, name, dict), [field.name for field in dataclasses.fields(Costs)]
    return Costs(**{cost: read_number(costs, cost, 0, _MAX_COST) for cost in names})


def calibrate(
    recipes: Sequence[str | gradwire.Recipe], on_progress: Callable[[int, int], None] | None = None
) -> Calibration:
    """Measure the costs of plain DDP's allreduce and of each recipe on this machine.

    Each takes a second or two. Calls ``on_progress`` with ``(recipes done, recipes in all)``. Raises
    ValueError for unknown recipes, and RanksFailed if a rank fails.
    """
    chosen = [r for r in dict.fromkeys(map(gradwire.recipe, recipes)) if r.exchange.communicates]

    def on_message(rank: int, num_done: int) -> None:
        if on_progress is not None:
            on_progress(num_done, 1 + len(chosen))

    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    arguments = ((None, *chosen), _NUM_STEPS)
    found = run_ranks(_measure, _NUM_RANKS, _TIMEOUT_S, args=arguments, on_message=on_message)
    names = [ALLREDUCE, *map(str, chosen)]
    costs = {name: _mean(list(ranks)) for name, *ranks in zip(names, *found, strict=True)}
    machine = Machine.here()
    return Calibration(str(machine), torch.__version__, costs, machine.num_cores, load_average)


def _mean(found: list[Costs]) -> Costs:
    return Costs(*(statistics.mean(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


# --- the inside of a rank ---


class _Matrices(nn.Module):
    """A model whose gradient is its input, and whose backward takes almost no time."""

    def __init__(self, count: int, side: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(side, side) for _ in range(count))

    def forward(self, gradient: Tensor) -> Tensor:
        products = [(matrix * part).sum() for matrix, part in zip(self.matrices, gradient, strict=True)]
        return torch.stack(products).sum()


def _measure(
    rank: int, recipes: Sequence[gradwire.Recipe | None], num_steps: dict[tuple[int, int], int]
) -> list[Costs]:
    message_ms, copy_ns = measure_messages()
    # The CPU time of a step that averages nothing.
    idle_ms = {size: _average(gradwire.noop(), size, num_steps[size]).cpu_ms for size in num_steps}
    costs = []
    for number, recipe in enumerate(recipes):
        if recipe is None:
            costs.append(_ring_costs(num_steps))
        else:
            large, small = (
                _average(recipe, size, num_steps[size]).without(idle_ms[size]) for size in (_LARGE, _SMALL)
            )
            costs.append(_recipe_costs(large, small, message_ms, copy_ns))
        if rank == 0:
            send_message(number + 1)
    return costs


def _numel(size: tuple[int, int]) -> int:
    count, side = size
    return count * side**2


@dataclass(frozen=True)
class _BucketCost:
    """The cost of averaging one bucket."""

    cpu_ms: float
    wait_ms: float
    bytes_sent: float
    num_messages: float

    def without(self, cpu_ms: float) -> _BucketCost:
        """Return the cost less the CPU time of a step that averages nothing."""
        return dataclasses.replace(self, cpu_ms=self.cpu_ms - cpu_ms)


def _recipe_costs(large: _BucketCost, small: _BucketCost, message_ms: float, copy_ns: float) -> Costs:
    """Split the cost of a large and a small bucket into that of values, bytes, messages and rounds."""
    working_ms = max(0.0, large.cpu_ms - small.cpu_ms - 1e-6 * copy_ns * large.bytes_sent)
    num_rounds = small.num_messages  # there is one peer
    return Costs(
        work_ns_per_value=1e6 * working_ms / _numel(_LARGE),
        copy_ns_per_byte=copy_ns,
        bucket_ms=max(0.0, small.cpu_ms - num_rounds * message_ms),
        message_ms=message_ms,
        round_ms=small.wait_ms / num_rounds,
    )


def _average(recipe: gradwire.Recipe, size: tuple[int, int], num_steps: int) -> _BucketCost:
    """Average one bucket several times, and return medians, with the model's own backward."""
    count, side = size
    torch.manual_seed(dist.get_rank())
    gradient = torch.randn(count, side, side)
    model = make_ddp(_Matrices(count, side), bucket_cap_mb=1000)
    cpu_ms = []
    with gradwire.attach(model, recipe) as wire:
        for _ in range(num_steps):
            model.zero_grad()
            loss = model(gradient)
            dist.barrier()
            begin_s = time.process_time()  # all threads together
            loss.backward()
            cpu_ms.append(1e3 * (time.process_time() - begin_s))
        steps = [step.buckets for step in wire.stats().steps]

    def typical(figures: Sequence[float]) -> float:
        """Return the median of all steps but the first two, in which DDP makes its buckets."""
        late = figures[2:]
        # Two at a time: a recipe may do one thing in even steps and another in odd ones.
        return statistics.median((one + other) / 2 for one, other in zip(late[::2], late[1::2], strict=True))

    def counted(figure: Callable[[BucketStats], float | None]) -> float:
        return typical([sum(figure(bucket) or 0.0 for bucket in step) for step in steps])

    return _BucketCost(
        cpu_ms=typical(cpu_ms),
        wait_ms=counted(lambda b: b.wait_ms),
        bytes_sent=counted(lambda b: b.bytes_sent),
        num_messages=counted(lambda b: b.num_messages),
    )


def _ring_costs(num_steps: dict[tuple[int, int], int]) -> Costs:
    """Return the costs of torch's own allreduce, a ring. Its sums count as part of moving its bytes."""
    (_, large_cpu_ms), (small_ms, small_cpu_ms) = (
        _time_allreduce(torch.ones(_numel(size)), num_steps[size]) for size in (_LARGE, _SMALL)
    )
    rounds = 2 * (_NUM_RANKS - 1)
    return Costs(
        work_ns_per_value=0.0,
        copy_ns_per_byte=1e6 * max(0.0, large_cpu_ms - small_cpu_ms) / (4 * _numel(_LARGE)),
        bucket_ms=0.0,
        message_ms=small_cpu_ms / rounds,
        round_ms=max(0.0, small_ms - small_cpu_ms) / rounds,
    )


def _time_allreduce(values: Tensor, num_times: int) -> tuple[float, float]:
    """Return the time and the CPU time of an allreduce, in ms."""
    found = []
    for _ in range(num_times):
        dist.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        dist.all_reduce(values)
        found.append((1e3 * (time.perf_counter() - begin_s), 1e3 * (time.process_time() - begin_cpu_s)))
    elapsed_ms, cpu_ms = (statistics.median(figures) for figures in zip(*found[1:], strict=True))
    return elapsed_ms, cpu_ms
