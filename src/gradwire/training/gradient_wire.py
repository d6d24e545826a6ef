"""The wire of a model that local SGD trains: it averages gradients during warm-up, and nothing after it."""

from __future__ import annotations

from datetime import timedelta

from gradwire.recipes import Recipe, noop
from gradwire.training.sites import Site


class GradientWire:
    """A wire with the recipe for gradients in the first steps, and without communication later."""

    def __init__(self, site: Site, recipe: Recipe, warmup_steps: int, timeout: timedelta) -> None:
        """Attach the recipe for the first step; collective."""
        self._site, self._recipe, self._warmup_steps, self._timeout = site, recipe, warmup_steps, timeout
        self._in_use = self._recipe_at(0)
        self.wire = site.attach(self._in_use, timeout)
        self.is_disabled = not self.wire.attached  # GRADWIRE_DISABLE is set

    def use_for(self, num_steps: int) -> None:
        """Attach the recipe for the step after ``num_steps``, if it is another one; collective."""
        if not self.is_disabled and self._in_use != self._recipe_at(num_steps):
            self.wire.detach()
            self._in_use = self._recipe_at(num_steps)
            self.wire = self._site.attach(self._in_use, self._timeout)

    def detach(self) -> None:
        self.wire.detach()

    def _recipe_at(self, num_steps: int) -> Recipe:
        return noop() if num_steps >= self._warmup_steps else self._recipe
