"""The comparison of a bucket's layout with the other ranks'."""

from __future__ import annotations

import functools

from gradwire.buckets import BucketLayout
from gradwire.lanes import CollectiveWork
from gradwire.peers import require_same
from gradwire.recipes import Recipe, fingerprint


class LayoutCheck:
    """Remembers which layouts all ranks have compared.

    Ranks that would send messages of different sizes must not begin: a message that meets a receive of
    another size ends the process.
    """

    def __init__(self) -> None:
        self._compared: dict[int, tuple[BucketLayout, Recipe | None]] = {}

    def work_for(self, layout: BucketLayout, recipe: Recipe | None = None) -> CollectiveWork | None:
        """Return the comparison of a new layout, for every rank to run; None if it has been compared."""
        if self._compared.get(layout.index) == (layout, recipe):
            return None
        self._compared[layout.index] = layout, recipe
        claim = {} if recipe is None else fingerprint.of_recipe(recipe)
        return functools.partial(require_same, {**claim, **fingerprint.of_bucket(layout)})
