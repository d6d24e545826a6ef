"""What is measured side by side, and what a rank finds: values that go to ranks and come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import gradwire
from gradwire.headroom.workloads import Buildable, Workload


def rows_of(recipes: Sequence[str | gradwire.Recipe]) -> tuple[gradwire.Recipe | None, ...]:
    """What is compared: plain DDP (None), the recipes, each once, and no communication at all.

    Raises ValueError if there is no such recipe.
    """
    chosen = dict.fromkeys(map(gradwire.recipe, recipes))
    chosen.pop(gradwire.noop(), None)
    return None, *chosen, gradwire.noop()


@dataclass(frozen=True)
class Contest:
    """Recipes that train the same model side by side, with plain DDP and with no communication.

    Raises ValueError for recipes that there are not, and for numbers and devices that make no sense.
    """

    recipes: Sequence[str | gradwire.Recipe]
    workload: Buildable = field(default_factory=Workload)
    num_steps: int | None = None
    """Timed steps of each row; None for as many as `seconds` allow, from 8 to 24."""
    seconds: float = 30.0
    """How long to measure, about; warming up comes on top."""
    bucket_mb: float | None = None
    """DDP's ``bucket_cap_mb``; None for DDP's own default."""
    small_bucket_mb: float | None = None
    """Buckets to try plain DDP and the best recipe with as well; None for not."""
    device: str = "cpu"
    """``"cuda"`` runs the ranks on the machine's GPUs, over NCCL; ranks may share one."""

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, not {self.num_steps}")
        for name in ("seconds", "bucket_mb", "small_bucket_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value:g}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"the device is cpu or cuda, not {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA device here; the device must be cpu")
        object.__setattr__(self, "recipes", tuple(map(gradwire.recipe, self.recipes)))

    @property
    def rows(self) -> tuple[gradwire.Recipe | None, ...]:
        """What takes turns: see `rows_of`."""
        return rows_of(self.recipes)


@dataclass(frozen=True)
class Entry:
    """What one row measures: plain DDP (None) or a recipe, with buckets of a size."""

    recipe: gradwire.Recipe | None
    bucket_mb: float | None
    """None is DDP's own default."""


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
    num_parameters: int
    gradient_bytes: int
