"""The wire of a model that local SGD trains: it averages gradients during warm-up, and nothing after it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from gradwire.averaging import checkpoint
from gradwire.recipes import Recipe, noop
from gradwire.training.sites import Site


class GradientWire:
    """A wire with the recipe for gradients in the first steps, and without communication later."""

    def __init__(
        self, site: Site, recipe: Recipe, warmup_steps: int, timeout: timedelta, num_steps: int = 0
    ) -> None:
        """Attach the recipe for the step after ``num_steps``; collective."""
        self._site, self._recipe, self._warmup_steps, self._timeout = site, recipe, warmup_steps, timeout
        self._in_use = self._recipe_at(num_steps)
        self.wire = site.attach(self._in_use, timeout)
        """None if nothing else averages the model's gradients."""
        self.is_disabled = self.wire is not None and not self.wire.attached  # GRADWIRE_DISABLE is set

    def use_for(self, num_steps: int) -> None:
        """Attach the recipe for the step after ``num_steps``, if it is another one; collective."""
        if not self.is_disabled and self._in_use != self._recipe_at(num_steps):
            self.detach()
            self._in_use = self._recipe_at(num_steps)
            self.wire = self._site.attach(self._in_use, self._timeout)

    def go_on_at(self, num_steps: int) -> None:
        """Average the step after ``num_steps`` next, with nothing held back so far; collective.

        A recipe may change by step. Other ranks may have joined, so that residuals would not fit.
        """
        self.use_for(num_steps)
        if self.wire is not None and num_steps < self._warmup_steps:
            self.wire.load_state_dict(self._blank_state(num_steps))

    def save(self, num_steps: int, *, gather: bool) -> dict[str, Any]:
        """Return the state of the wire."""
        return self._blank_state(num_steps) if self.wire is None else self.wire.state_dict(gather=gather)

    def load(self, state: dict[str, Any]) -> None:
        """Load what `save` returned; collective."""
        if self.wire is not None:
            self.wire.load_state_dict(state)

    def detach(self) -> None:
        if self.wire is not None:
            self.wire.detach()

    def _blank_state(self, num_steps: int) -> dict[str, Any]:
        """Return the state of a wire that has held back nothing."""
        return checkpoint.write(str(self._in_use), num_steps, (), {}, self._site.rank, self._site.grid)

    def _recipe_at(self, num_steps: int) -> Recipe:
        return noop() if num_steps >= self._warmup_steps else self._recipe
