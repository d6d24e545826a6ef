"""Models that are trained side by side, one per variant of a benchmark."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.buckets import trainable_parameters
from gradwire.ddp import attachment_of, is_ddp, local_part, make_ddp
from gradwire.headroom.benchmark import Benchmark, Measurement, Variant
from gradwire.headroom.decisions import decisions_of
from gradwire.headroom.devices import largest_of_ranks, open_group, sum_of_ranks
from gradwire.headroom.records import Row
from gradwire.headroom.typical_steps import sent_per_step, typical_ms
from gradwire.headroom.workloads import BuiltWorkload
from gradwire.sharded import is_sharded, shard_blocks
from gradwire.telemetry import StepStats
from gradwire.training import count_layers


class TimedModel:
    """A model that trains as its variant says, and the times of its steps.

    Raises RuntimeError if gradwire is disabled, so that the recipe cannot be attached.
    """

    def __init__(
        self, variant: Variant, built: BuiltWorkload, model: nn.Module, device: torch.device
    ) -> None:
        """Train ``model``, which is that of ``built``, wrapped or sharded."""
        self.variant = variant
        self.gradient_error: float | None = None
        """Relative error of the first step's averaged gradient, or of the encodings that ``auto`` has used
        last; None so far or if unknown."""
        self.warm_up_s: list[float] = []
        """Times of the steps before the measurement, each that of the slowest rank."""
        self.times_s: list[float] = []
        """Times of the measured steps on this rank."""
        self.model = model
        self.wire = None if variant.recipe is None else gradwire.attach(self.model, variant.recipe)
        if self.wire is not None and not self.wire.attached:
            raise RuntimeError(
                f"{variant.recipe} was not attached, so it cannot be measured: unset GRADWIRE_DISABLE"
            )
        self._built = built
        self._device = device

    def step(self) -> float:
        """Run a step and return its time in seconds.

        There is no optimizer: its time would be the same for all variants.
        """
        self._note_error()
        begin_s = time.perf_counter()
        self.model.zero_grad()
        self._built.step_loss(self.model).backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin_s

    def _note_error(self) -> None:
        """Note the error of the encodings that ``auto`` has chosen for the next step, if it has."""
        tuned = None if self.wire is None else attachment_of(self.wire).tuned
        if tuned is not None and tuned.error is not None:
            self.gradient_error = tuned.error

    def row_so_far(self) -> Row:
        """Return the row that the steps before the measurement would make; call it on every rank."""
        (largest,) = largest_of_ranks([sent_per_step(self._steps(), "bytes_sent") or 0.0])
        times_ms = tuple(1e3 * time_s for time_s in self.warm_up_s)
        return Row(str(self.variant.recipe), times_ms, int(largest), gradient_error=self.gradient_error)

    def finish(self) -> Measurement:
        """Detach the recipe and return everything that was measured."""
        times_s = tuple(self.times_s)
        if self.wire is None:
            return Measurement(self.variant, times_s, None, None, None, None, self.gradient_error, ())
        steps = self._steps()
        num_bytes, num_messages = (sent_per_step(steps, each) for each in ("bytes_sent", "num_messages"))
        self.wire.detach()
        return Measurement(
            self.variant,
            times_s,
            None if num_bytes is None else int(num_bytes),
            None if num_messages is None else int(num_messages),
            typical_ms(steps, "wait_ms"),
            typical_ms(steps, "work_ms"),
            self.gradient_error,
            decisions_of([self.wire]),
        )

    def _steps(self) -> tuple[StepStats, ...]:
        """Return the figures of the last steps; none for plain DDP."""
        return () if self.wire is None else self.wire.stats().steps


class TimedModelFactory:
    """Makes models that differ in nothing but their variants."""

    def __init__(self, benchmark: Benchmark) -> None:
        self._workload = benchmark.workload
        self.group, self.device = open_group(benchmark.device)
        sharding = benchmark.sharding
        self._mesh = None if sharding is None else sharding.mesh(self.group, self.device)
        # Each rank has its own batch. DDP gives all ranks the weights of rank 0.
        torch.manual_seed(1 + dist.get_rank())
        self._batch = self._build().batch

    def make(self, variant: Variant) -> TimedModel:
        """Make a model with the same weights and the same batch as all others."""
        torch.manual_seed(0)
        built = replace(self._build(), batch=self._batch)
        return TimedModel(variant, built, self._distributed(built.model, variant), self.device)

    def _distributed(self, model: nn.Module, variant: Variant) -> nn.Module:
        if variant.is_alone:
            return model
        if self._mesh is not None:
            return shard_blocks(model, self._mesh)
        return make_ddp(model, bucket_cap_mb=variant.bucket_mb, process_group=self.group)

    def _build(self) -> BuiltWorkload:
        return self._workload.build().to(self.device)


def gradient_bytes(model: nn.Module) -> int:
    """Return the size of the gradients that a step averages."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def num_layers(model: nn.Module) -> int:
    """Return the number of layers that an outer loop can average in turns."""
    whole = model.module if is_ddp(model) else model
    assert isinstance(whole, nn.Module)
    return count_layers(trainable_parameters(whole))


def relative_error(model: nn.Module, exact: nn.Module) -> float | None:
    """Return the relative error of all gradients of ``model`` together, in the 2-norm; None if infinite.

    Collective if the models are sharded: each rank has a part of the gradients.
    """
    # One parameter at a time, as models may be large.
    difference = whole = 0.0
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        if ours.grad is not None and theirs.grad is not None:
            mine, right = local_part(ours.grad), local_part(theirs.grad)
            difference += _sum_of_squares(mine - right)
            whole += _sum_of_squares(right)
    if is_sharded(model):
        difference, whole = sum_of_ranks([difference, whole])
    return math.sqrt(difference / whole) if whole and math.isfinite(difference) else None


def _sum_of_squares(gradient: torch.Tensor) -> float:
    """Return the sum in fp64, without a copy of the gradient in fp64."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
