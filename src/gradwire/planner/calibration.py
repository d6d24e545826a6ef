"""Measures what recipes cost beside their bytes: two ranks on this machine average one bucket."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom.records import ALLREDUCE, Machine
from gradwire.planner.cost import Costs
from gradwire.testing import run_ranks

_LARGE, _SMALL = 6_553_600, 1024  # values: DDP's bucket of 25 MB, and next to nothing
_NUM_STEPS = {_LARGE: 10, _SMALL: 60}
_TIMEOUT_S = 300.0
_SCHEMA_VERSION = 1


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
    """Measure the costs of plain DDP's allreduce and of each recipe on this machine; seconds each.

    Raises ValueError if there is no such recipe, and RanksFailed if a rank fails.
    """
    chosen = [r for r in dict.fromkeys(map(gradwire.recipe, recipes)) if r.exchange.communicates]
    costs = {}
    for index, recipe in enumerate([None, *chosen]):
        if on_progress is not None:
            on_progress(index, 1 + len(chosen))
        found = run_ranks(_measure, 2, _TIMEOUT_S, args=(recipe,))
        costs[ALLREDUCE if recipe is None else str(recipe)] = _mean(found)
    return Calibration(str(Machine.here()), torch.__version__, costs)


def _mean(found: list[Costs]) -> Costs:
    return Costs(*(statistics.mean(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


# --- inside a rank ---


class _OneBucket(nn.Module):
    """A model whose backward is next to nothing and whose gradient is as large as wanted."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        # A matrix, as most parameters are: low-rank recipes leave vectors alone.
        self.values = nn.Parameter(torch.randn(numel // 256, 256) / 256)

    def forward(self, scale: Tensor) -> Tensor:
        out: Tensor = (self.values * scale).sum()
        return out


def _measure(rank: int, recipe: gradwire.Recipe | None) -> Costs:
    large, small = (_exchange(recipe, numel) for numel in (_LARGE, _SMALL))
    rounds = small["num_messages"]
    message_ms = small["elapsed_ms"] / rounds  # one to the one peer in each round
    moving_ms = max(0.0, large["elapsed_ms"] - large["work_ms"] - small["elapsed_ms"])
    return Costs(
        work_ns_per_value=1e6 * large["work_ms"] / _LARGE,
        copy_ns_per_byte=1e6 * moving_ms / large["bytes_sent"],
        rounds_per_bucket=rounds,
        ms_per_message=message_ms,
    )


def _exchange(recipe: gradwire.Recipe | None, numel: int) -> dict[str, Any]:
    """Medians over a few averagings of one bucket."""
    if recipe is None:
        values, elapsed = torch.randn(numel), []
        for _ in range(_NUM_STEPS[numel]):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(values)
            elapsed.append(1e3 * (time.perf_counter() - begin))
        # A ring's own sums are part of what it takes to move its bytes.
        return {
            "elapsed_ms": statistics.median(elapsed[1:]),
            "work_ms": 0.0,
            "bytes_sent": 4 * numel,
            "num_messages": 2,
        }
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(_OneBucket(numel), bucket_cap_mb=1000)
    with gradwire.attach(model, recipe) as wire:
        for _ in range(_NUM_STEPS[numel]):
            dist.barrier()
            model.zero_grad()
            model(torch.randn(numel // 256, 256)).backward()
        steps = [step.buckets for step in wire.stats().steps[1:]]
    work_ms = statistics.median(sum(b.work_ms or 0.0 for b in buckets) for buckets in steps)
    wait_ms = statistics.median(sum(b.wait_ms or 0.0 for b in buckets) for buckets in steps)
    return {
        "elapsed_ms": work_ms + wait_ms,
        "work_ms": work_ms,
        "bytes_sent": sum(b.bytes_sent or 0 for b in steps[-1]),
        "num_messages": sum(b.num_messages or 0 for b in steps[-1]),
    }
