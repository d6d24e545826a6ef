"""The comparison of bucket layouts over ranks."""

from __future__ import annotations

import functools

from gradwire.buckets import BucketLayout
from gradwire.lanes import CollectiveWork
from gradwire.peers import require_same
from gradwire.recipes import Recipe, fingerprint


class LayoutCheck:
    """Compare each new layout over ranks, once.

    Ranks with different layouts would send messages of different sizes. Gloo ends the process when a message
    has another size than its receive, so ranks compare layouts before the first message.
    """

    def __init__(self) -> None:
        self._compared: dict[int, tuple[BucketLayout, Recipe | None]] = {}

    def work_for(self, layout: BucketLayout, recipe: Recipe | None = None) -> CollectiveWork | None:
        """Return the collective work that compares ``layout``; None if it has been compared."""
        if self._compared.get(layout.index) == (layout, recipe):
            return None
        self._compared[layout.index] = layout, recipe
        claim = {} if recipe is None else fingerprint.of_recipe(recipe)
        return functools.partial(require_same, {**claim, **fingerprint.of_bucket(layout)})
