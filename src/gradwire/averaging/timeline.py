"""The grouping of parameters into buckets in which each step is exchanged.

Note [Which layout a step is exchanged in]: block scales and seeds depend on where in which bucket a value
lies, and DDP begins every run with other buckets than those it rebuilds after ``num_transient`` steps. If
each step were exchanged as it arrives, a resumed run would differ from one that was not stopped. So a wire
keeps a timeline of groupings, and a checkpoint carries it. In its first ``num_transient`` steps, a run is
exchanged by the timeline, whatever arrives. What arrives after them is the timeline's next entry, from step
``2 * num_transient`` on and not before: so also a run that was resumed from within the first steps, and
sees the rebuilt buckets that much later, changes its grouping at the same step. After that, buckets are
exchanged as they arrive, without a copy. (A run that is stopped twice within its first steps, before it
has seen the rebuilt buckets again, cannot know them, and changes its grouping later.)
"""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.buckets import BucketLayout

Grouping = tuple[tuple[str, tuple[str, ...]], ...]
"""The dtype of every bucket and its parameters' names, in order."""


def grouping_of(layouts: Iterable[BucketLayout]) -> Grouping:
    """Return how these buckets group the parameters."""
    return tuple(
        (str(layout.dtype).removeprefix("torch."), tuple(slot.name for slot in layout.slots))
        for layout in layouts
    )


class Timeline:
    """The groupings of a run, each with its first step."""

    def __init__(self, num_transient: int = 0) -> None:
        """Expect DDP to rebuild its buckets after ``num_transient`` steps of a run; 0 if it never does."""
        self._num_transient = num_transient
        self._first_step = 0
        self._entries: list[tuple[int, Grouping]] = []

    def at(self, step: int) -> Grouping | None:
        """Return the grouping that ``step`` must be exchanged in; None for the one in which it arrives."""
        settled = max(2 * self._num_transient, self._first_step + self._num_transient)
        if step >= settled:
            return None
        return next((grouping for start, grouping in reversed(self._entries) if start <= step), None)

    def arrived(self, step: int, grouping: Grouping) -> None:
        """Note the grouping in which ``step`` has arrived."""
        if not self._entries:
            self._entries = [(step, grouping)]
        elif step >= self._first_step + self._num_transient and self._entries[-1][1] != grouping:
            self._entries.append((max(step, 2 * self._num_transient), grouping))

    def save(self, next_step: int) -> list[tuple[int, Grouping]]:
        """Return the entries that a run needs to go on with ``next_step``."""
        later = [entry for entry in self._entries if entry[0] > next_step]
        return self._entries[-len(later) - 1 :]

    def load(self, next_step: int, entries: list[tuple[int, Grouping]]) -> None:
        """Go on with ``next_step`` from what `save` returned."""
        self._first_step, self._entries = next_step, list(entries)
