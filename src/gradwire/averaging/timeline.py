"""The timeline: the grouping of parameters into buckets in which each step is averaged.

Note [Which layout a step is exchanged in]: block scales and seeds depend on a value's bucket and its place in
it. DDP begins every run with other buckets than those that it rebuilds after ``num_transient`` steps. If each
step were averaged as it arrives, a resumed run would differ from one that was not stopped. So a wire keeps a
timeline of groupings, and a checkpoint holds it.

- In the first ``num_transient`` steps after a start or a resume, the timeline decides the grouping.
- The grouping that arrives after them is the timeline's next entry. It applies from step
  ``2 * num_transient`` on, not earlier. A run that is resumed within its first steps sees the rebuilt
  buckets that much later, and so changes its grouping at the same step.
- After that, buckets are averaged as they arrive, without a copy.

One case is left: a run that is stopped twice within its first steps, before it has seen the rebuilt buckets
again, cannot know them, and changes its grouping later.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.buckets import BucketLayout, dtype_name

Grouping = tuple[tuple[str, tuple[str, ...]], ...]
"""Every bucket's dtype and parameter names, in order."""


def grouping_of(layouts: Iterable[BucketLayout]) -> Grouping:
    """Return the grouping of parameters in these buckets."""
    return tuple((dtype_name(layout.dtype), tuple(slot.name for slot in layout.slots)) for layout in layouts)


class Timeline:
    """The groupings of a run, each with its first step."""

    def __init__(self, num_transient: int | None = 0) -> None:
        """Expect DDP to rebuild its buckets after ``num_transient`` steps of a run; 0 if it never does.

        None for a caller whose steps may all have different buckets: the timeline then stays empty.
        """
        self._keeps_groupings = num_transient is not None
        self._num_transient = num_transient or 0
        self._first_step = 0
        self._entries: list[tuple[int, Grouping]] = []

    def at(self, step: int) -> Grouping | None:
        """Return the grouping in which ``step`` must be averaged; None to take it as it arrives."""
        settled = max(2 * self._num_transient, self._first_step + self._num_transient)
        if step >= settled:
            return None
        return next((grouping for start, grouping in reversed(self._entries) if start <= step), None)

    def arrived(self, step: int, grouping: Grouping) -> None:
        """Note the grouping in which ``step`` has arrived."""
        if not self._keeps_groupings:
            return
        if not self._entries:
            self._entries = [(step, grouping)]
        elif step >= self._first_step + self._num_transient and self._entries[-1][1] != grouping:
            self._entries.append((max(step, 2 * self._num_transient), grouping))

    def save(self, next_step: int) -> list[tuple[int, Grouping]]:
        """Return the entries that a run needs to resume at ``next_step``."""
        later = [entry for entry in self._entries if entry[0] > next_step]
        return self._entries[-len(later) - 1 :]

    def load(self, next_step: int, entries: list[tuple[int, Grouping]]) -> None:
        """Resume at ``next_step`` with the entries that `save` returned."""
        self._first_step, self._entries = next_step, list(entries)
