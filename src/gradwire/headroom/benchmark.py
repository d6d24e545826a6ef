"""A benchmark, and the result of one of its ranks: values that go to ranks and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import gradwire
from gradwire.headroom.records import Proposal
from gradwire.headroom.sharding import Sharding
from gradwire.headroom.workloads import Buildable, Workload
from gradwire.tuning import DecisionSummary

OnProgress = Callable[[int, int], None]
"""Called with the number of steps (or runs) done, and their number in all."""


def compared_recipes(recipes: Sequence[str | gradwire.Recipe]) -> tuple[gradwire.Recipe | None, ...]:
    """Return everything to compare: plain DDP (None), each recipe once, and no communication.

    Raises ValueError if there is no such recipe.
    """
    chosen = dict.fromkeys(map(gradwire.recipe, recipes))
    chosen.pop(gradwire.noop(), None)
    return None, *chosen, gradwire.noop()


@dataclass(frozen=True)
class Benchmark:
    """Recipes that train the same model side by side, with plain DDP and without communication.

    Raises ValueError for unknown recipes, numbers out of range, and devices that are not there.
    """

    recipes: Sequence[str | gradwire.Recipe]
    workload: Buildable = field(default_factory=Workload)
    num_steps: int | None = None
    """Timed steps per row; None for as many as `seconds` allows, from 8 to 24."""
    seconds: float = 45.0
    """Approximate time to measure, with warm-up."""
    bucket_mb: float | None = None
    """DDP's ``bucket_cap_mb``; None for DDP's own default."""
    small_bucket_mb: float | None = None
    """Bucket size to try with plain DDP and the best recipe as well; None to try no other."""
    device: str = "cpu"
    """``"cuda"`` runs the ranks on the machine's GPUs, over NCCL; ranks may share a GPU."""
    budget: float | None = None
    """The budget of recipe ``auto``, to say what it would send; None to leave that out."""
    sharding: Sharding | None = None
    """The shards of the model, by ``fully_shard``; None for DDP."""

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, not {self.num_steps}")
        for name in ("seconds", "bucket_mb", "small_bucket_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value:g}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"the device must be cpu or cuda, not {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA device here: use the device cpu")
        if self.budget is not None:
            gradwire.recipe(f"auto:budget={self.budget:g}")  # raises ValueError for what is no budget
        if self.sharding is not None and (self.bucket_mb or self.small_bucket_mb or self.budget):
            raise ValueError("bucket sizes and the budget of auto are those of DDP: leave them out")
        object.__setattr__(self, "recipes", tuple(map(gradwire.recipe, self.recipes)))
        if self.sharding is not None:
            for recipe in self.recipes:
                self.sharding.check(gradwire.recipe(recipe))

    @property
    def compared(self) -> tuple[gradwire.Recipe | None, ...]:
        """The recipes that take turns, None for plain DDP: see `compared_recipes`."""
        return compared_recipes(self.recipes)


@dataclass(frozen=True)
class Variant:
    """One way to train the workload: a recipe, and DDP's bucket size."""

    recipe: gradwire.Recipe | None
    """None for plain DDP."""
    bucket_mb: float | None
    """None for DDP's own default."""
    is_alone: bool = False
    """True for a model that is neither sharded nor averaged: the rank trains by itself."""


@dataclass(frozen=True)
class Measurement:
    """One rank's figures for one variant; None if unknown."""

    variant: Variant
    times_s: tuple[float, ...]
    """Time of each step."""
    bytes_per_step: int | None
    """Bytes that the rank sends in a step."""
    num_messages: int | None
    """Messages that the rank sends in a step."""
    wait_ms: float | None
    """Time in a step that buckets wait for other ranks."""
    work_ms: float | None
    """Time in a step that buckets are encoded, summed and decoded."""
    gradient_error: float | None
    """Relative error of the first step's averaged gradient, in the 2-norm; for ``auto``, with the encodings
    of the last step."""
    decisions: tuple[tuple[DecisionSummary, ...], ...]
    """The decisions of recipe ``auto``, as in a row."""


@dataclass(frozen=True)
class RankResult:
    """One rank's figures for the whole benchmark."""

    measurements: tuple[Measurement, ...]
    num_threads: int
    backend: str
    device: str
    num_parameters: int
    gradient_bytes: int
    num_layers: int
    proposal: Proposal | None = None
    """The choice of recipe ``auto``; None if it was not asked for."""
