"""Measures what recipes cost beside their bytes: two ranks on this machine average one bucket."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom.records import ALLREDUCE, Machine
from gradwire.planner.cost import Costs
from gradwire.stats import BucketStats
from gradwire.testing import run_ranks, send_message

# Matrices, as most parameters are, and their side: DDP's bucket of 25 MB, and next to nothing.
_LARGE, _SMALL = (25, 512), (1, 32)
_NUM_STEPS = {_LARGE: 12, _SMALL: 60}
_TIMEOUT_S = 600.0
_SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Calibration:
    """The costs of each recipe on one machine; ``allreduce`` is plain DDP."""

    machine: str
    torch_version: str
    costs: dict[str, Costs]

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        return json.dumps({"calibration_version": _SCHEMA_VERSION, **fields}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """What `to_json` wrote. Raises ValueError for anything else."""
        try:
            data = json.loads(text)
            if data["calibration_version"] != _SCHEMA_VERSION:
                raise ValueError(f"its version is {data['calibration_version']}, not {_SCHEMA_VERSION}")
            costs = {name: Costs(**figures) for name, figures in data["costs"].items()}
            return cls(data["machine"], data["torch_version"], costs)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a calibration: {error}") from None


def calibrate(
    recipes: Sequence[str | gradwire.Recipe], on_progress: Callable[[int, int], None] | None = None
) -> Calibration:
    """Measure the costs of plain DDP's allreduce and of each recipe on this machine; a second or two each.

    Calls ``on_progress`` with ``(recipes done, recipes in all)``. Raises ValueError if there is no such
    recipe, and RanksFailed if a rank fails.
    """
    chosen = [r for r in dict.fromkeys(map(gradwire.recipe, recipes)) if r.exchange.communicates]

    def on_message(rank: int, num_done: int) -> None:
        if on_progress is not None:
            on_progress(num_done, 1 + len(chosen))

    found = run_ranks(_measure, 2, _TIMEOUT_S, args=((None, *chosen), _NUM_STEPS), on_message=on_message)
    names = [ALLREDUCE, *map(str, chosen)]
    costs = {name: _mean(list(ranks)) for name, *ranks in zip(names, *found, strict=True)}
    return Calibration(str(Machine.here()), torch.__version__, costs)


def _mean(found: list[Costs]) -> Costs:
    return Costs(*(statistics.mean(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


# --- inside a rank ---


class _Matrices(nn.Module):
    """A model whose backward is next to nothing and whose gradient is what it is given."""

    def __init__(self, count: int, side: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(side, side) for _ in range(count))

    def forward(self, gradient: Tensor) -> Tensor:
        products = [(matrix * part).sum() for matrix, part in zip(self.matrices, gradient, strict=True)]
        return torch.stack(products).sum()


def _measure(
    rank: int, recipes: Sequence[gradwire.Recipe | None], num_steps: dict[tuple[int, int], int]
) -> list[Costs]:
    costs = []
    for number, recipe in enumerate(recipes):
        large, small = (_exchange(recipe, size, num_steps[size]) for size in (_LARGE, _SMALL))
        rounds = small.num_messages  # to the one peer
        moving_ms = max(0.0, large.wait_ms - small.elapsed_ms)
        costs.append(
            Costs(
                work_ns_per_value=1e6 * large.work_ms / (_LARGE[0] * _LARGE[1] ** 2),
                copy_ns_per_byte=1e6 * moving_ms / large.bytes_sent,
                rounds_per_bucket=rounds,
                ms_per_message=small.elapsed_ms / rounds,
            )
        )
        if rank == 0:
            send_message(number + 1)
    return costs


@dataclass(frozen=True)
class _Averaging:
    """What it takes to average one bucket."""

    work_ms: float
    wait_ms: float
    bytes_sent: float
    num_messages: float

    @property
    def elapsed_ms(self) -> float:
        return self.work_ms + self.wait_ms


def _exchange(recipe: gradwire.Recipe | None, size: tuple[int, int], num_steps: int) -> _Averaging:
    """Medians over a few averagings of one bucket."""
    count, side = size
    numel = count * side**2
    torch.manual_seed(dist.get_rank())
    gradient = torch.randn(count, side, side)
    if recipe is None:
        # A ring's own sums are part of what it takes to move its bytes.
        elapsed_ms = statistics.median([_time_allreduce(gradient) for _ in range(num_steps)][1:])
        return _Averaging(0.0, elapsed_ms, 4 * numel, 2)
    model = DistributedDataParallel(_Matrices(count, side), bucket_cap_mb=1000)
    with gradwire.attach(model, recipe) as wire:
        for _ in range(num_steps):
            dist.barrier()
            model.zero_grad()
            model(gradient).backward()
        steps = [step.buckets for step in wire.stats().steps[2:]]
    # Two at a time, as recipes may do one thing in even steps and another in odd ones.
    pairs = [(*one, *other) for one, other in zip(steps[::2], steps[1::2], strict=True)]

    def typical(figure: Callable[[BucketStats], float | None]) -> float:
        return statistics.median(sum(figure(b) or 0.0 for b in pair) / 2 for pair in pairs)

    return _Averaging(
        work_ms=typical(lambda b: b.work_ms),
        wait_ms=typical(lambda b: b.wait_ms),
        bytes_sent=typical(lambda b: b.bytes_sent),
        num_messages=typical(lambda b: b.num_messages),
    )


def _time_allreduce(values: Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(values)
    return 1e3 * (time.perf_counter() - begin)
