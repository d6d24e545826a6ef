"""The arguments of `LocalSGD`, and their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from torch.optim import Optimizer

from gradwire.loops import check_weight
from gradwire.ops import warm_up
from gradwire.peers import require_timeout
from gradwire.recipes import Recipe, fingerprint, kernels_of, require_fixed
from gradwire.recipes import recipe as parse_recipe
from gradwire.training.fragments import divided
from gradwire.training.inner_optimizer import InnerOptimizer
from gradwire.training.outer import DiLoCo, Outer
from gradwire.training.sites import Site
from gradwire.training.turns import Turns, make_turns


@dataclass(frozen=True)
class LocalOptions:
    """The arguments that do not depend on the sites."""

    period: int | timedelta
    warmup_steps: int
    recipe: str | Recipe | None
    gradient_recipe: str | Recipe | None
    outer: Outer | None
    weigh: bool
    offload: bool
    timeout: timedelta | None

    @property
    def is_timed(self) -> bool:
        """True if the period is a time, so that each rank takes as many steps as it can."""
        return isinstance(self.period, timedelta)

    @property
    def streaming(self) -> DiLoCo:
        """The way in which averagings are spread over a period; by default all at once."""
        return streaming_of(self.outer)

    def make_turns(self) -> Turns:
        """Return the turns of fragments; ValueError if the period is too short for them."""
        return make_turns(self.period, self.streaming.num_fragments)

    def choose(self, site: Site, inner: InnerOptimizer) -> tuple[Recipe, Recipe]:
        """Return the recipes for parameters and for gradients; ValueError or TypeError for what is unfit."""
        require_timeout(self.timeout)
        check_period(self.period, self.warmup_steps, self.streaming.delay)
        check_outer(self.outer)
        if self.is_timed:
            site.check_steps_may_differ()
        self.make_turns()
        chosen = site.resolve(parse_averaging(self.recipe, self.outer, self.weigh))
        if self.weigh:
            check_weight(1.0, chosen)
        for_gradients = chosen if self.gradient_recipe is None else parse_recipe(self.gradient_recipe)
        divided(inner.parameters(), site.layouts, self.outer)
        warm_up(site.device, kernels_of(chosen, site.group))
        return chosen, for_gradients

    def claim(self, site: Site, chosen: Recipe) -> dict[str, str]:
        """Return the facts that must be equal on all ranks."""
        own = {
            "period": str(self.period),
            "warmup_steps": str(self.warmup_steps),
            "outer": repr(self.outer),
            "weigh": str(self.weigh),
        }
        return {**own, **site.claim(fingerprint.of_recipe(chosen))}


def streaming_of(outer: Outer | None) -> DiLoCo:
    """Return how averagings are spread over a period; by default all at once."""
    return outer if isinstance(outer, DiLoCo) else DiLoCo()


def check_period(period: int | timedelta, warmup_steps: int, delay: int) -> None:
    """Raise ValueError or TypeError for a period, a warm-up or a delay that cannot be."""
    if isinstance(period, timedelta):
        if period <= timedelta(0):
            raise ValueError(f"period must be more than 0 seconds, not {period.total_seconds():g}")
    elif not isinstance(period, int) or isinstance(period, bool):
        raise TypeError(f"period is a number of steps or a datetime.timedelta, not {period!r}")
    elif period < 1:
        raise ValueError(f"period must be at least 1, not {period}")
    elif delay >= period:
        raise ValueError(
            f"delay must be less than the period of {period} steps, not {delay}: an averaging ends before "
            "the next one of the same parameters begins"
        )
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool):
        raise TypeError(f"warmup_steps is a number of steps, not {warmup_steps!r}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, not {warmup_steps}")


def check_outer(outer: object) -> None:
    """Raise TypeError for what is no outer optimizer: the first averaging would be too late."""
    if outer is not None and (isinstance(outer, type) or not callable(getattr(outer, "update", None))):
        what = "outer is an outer optimizer, such as gradwire.DiLoCo(), or None"
        if isinstance(outer, type):
            raise TypeError(f"{what}, not the class {outer.__name__}: call it, as in {outer.__name__}(...)")
        if isinstance(outer, Optimizer):
            name = f"torch.optim.{type(outer).__name__}"
            raise TypeError(f"{what}, not {name}; for SGD with Nesterov momentum, give gradwire.DiLoCo()")
        raise TypeError(f"{what}, not {outer!r}")


def check_work(work: float) -> float:
    """Return the work of a step as a number; ValueError if it can be no part of a weight."""
    number = float(work)
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"work must be finite and not negative, not {number:g}")
    return number


def parse_averaging(recipe: str | Recipe | None, outer: Outer | None, weigh: bool) -> Recipe:
    """Return the recipe for parameters, or the default; ValueError if it does not average."""
    if recipe is None:
        # With DiLoCo the loss in 4 bits is that of fp32 (docs/fidelity.md); with others it was not measured.
        recipe = ("int4:feedback=false" if weigh else "int4") if isinstance(outer, DiLoCo) else "fp32"
    chosen = parse_recipe(recipe)
    require_fixed(chosen, "local SGD")
    if any(each.momentum for each in chosen.leaves()):
        raise ValueError(
            f"recipe {chosen} has a momentum of gradients, and local SGD averages parameters: leave "
            "momentum= out, and give the momentum to outer=, such as gradwire.DiLoCo(momentum=0.9)"
        )
    if not chosen.exchange.communicates or chosen.reduction != "mean":
        raise ValueError(f"local SGD needs a recipe that averages, and {chosen} does not: choose another")
    return chosen
