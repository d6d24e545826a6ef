"""The turns of fragments: when the averaging of each begins, by steps or by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

AnyOf = Callable[[bool], bool]


class Turns(Protocol):
    """Decides when a fragment's turn has come. The order of turns is the same on all ranks."""

    def due(self, num_local: int, any_of: AnyOf = bool) -> int | None:
        """Return the fragment whose averaging begins after local step ``num_local``; None if none does.

        ``any_of`` tells if a flag is True on any rank of the same site.
        """
        ...

    def restart(self, num_taken: int) -> None:
        """Begin a period now, when ``num_taken`` turns have been taken."""
        ...


class TurnsBySteps:
    """A period in steps. Turns are spread evenly over it; fragment 0 is averaged at its end."""

    def __init__(self, period: int, num_fragments: int) -> None:
        self._period = period
        self._fragment_at = {number * period // num_fragments: number for number in range(num_fragments)}
        if len(self._fragment_at) < num_fragments:
            raise ValueError(
                f"a period of {period} steps is too short for {num_fragments} fragments, each averaged at a "
                "step of its own: give a longer period, or fewer fragments"
            )

    def due(self, num_local: int, any_of: AnyOf = bool) -> int | None:
        return self._fragment_at.get(num_local % self._period)

    def restart(self, num_taken: int) -> None:
        """Do nothing: steps decide alone."""


class TurnsByTime:
    """A period in seconds. Ranks take as many steps in it as they can.

    After a pause, turns that were missed are not made up for.
    """

    def __init__(
        self, period: timedelta, num_fragments: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = period.total_seconds() / num_fragments
        self._num_fragments = num_fragments
        self._clock = clock
        self._num_taken, self._due_s = 0, clock() + self._interval_s

    def due(self, num_local: int, any_of: AnyOf = bool) -> int | None:
        return self.take() if any_of(self.is_due) else None

    @property
    def is_due(self) -> bool:
        """True if the time of the next turn has come, by this rank's clock."""
        return self._clock() >= self._due_s

    @property
    def next_fragment(self) -> int:
        """The fragment of the next turn."""
        return (self._num_taken + 1) % self._num_fragments

    def take(self) -> int:
        """Take the next turn, even if its time has not come; return its fragment."""
        now, self._due_s = self._clock(), self._due_s + self._interval_s
        if self._due_s <= now:
            self._due_s = now + self._interval_s
        fragment = self.next_fragment
        self._num_taken += 1
        return fragment

    def restart(self, num_taken: int) -> None:
        self._num_taken, self._due_s = num_taken, self._clock() + self._interval_s


def make_turns(period: int | timedelta, num_fragments: int) -> Turns:
    """Return the turns of a period; ValueError if it is too short for the fragments."""
    if isinstance(period, timedelta):
        return TurnsByTime(period, num_fragments)
    return TurnsBySteps(period, num_fragments)
