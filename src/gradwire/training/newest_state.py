"""The newest state of all sites, from which all go on: those that have it, and those that take it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwire.training.local_state import Turn
from gradwire.training.site_call import MIXED, SitesCall


@dataclass(frozen=True)
class Position:
    """The place of a rank's state in the run."""

    num_steps: int
    turn: Turn

    def note(self) -> str:
        """Return a text that `newest` reads, the same on all ranks of a site."""
        return json.dumps({"num_steps": self.num_steps, "turn": replace(self.turn, work=()).save()})


@dataclass(frozen=True)
class Newest:
    """The newest state of all ranks."""

    position: Position
    source: int
    """The rank that has it, and that the others take it from."""
    is_current: bool
    """True if this site can go on with its own state, since it has taken part in the same averagings."""
    is_everywhere: bool
    """True if all sites are current, with the same averagings under way."""
    is_apart: bool
    """True if this site has as many averages, but took part in others."""


def meet(call: SitesCall, own: Position, warmup_steps: int) -> tuple[str, Newest | None]:
    """Return a name for this group, which no other ever has, and the newest state; collective."""
    answers = call.agree({}, f"{call.site_name} {own.note() if own.num_steps else ''}")
    notes = [answer if answer == MIXED else answer.partition(" ")[2] for answer in answers]
    found = newest(notes, call.group.rank(), warmup_steps)
    return min(answer.partition(" ")[0] for answer in answers if answer != MIXED), found


def newest(notes: Sequence[str], site: int, warmup_steps: int = 0) -> Newest | None:
    """Return the newest state; ``notes`` has every site's `Position.note`, or "" if it has no state.

    A state is newer if it has more averages, applied or under way; of those with as many, if it has more
    steps. A site whose ranks have different states has none. Raises ValueError if there is no other.
    """
    found: dict[int, Position] = {}
    for each, note in enumerate(notes):
        if note and note != MIXED:
            fields = json.loads(note)
            found[each] = Position(fields["num_steps"], Turn.read(fields["turn"]))
    if not found and MIXED in notes:
        raise ValueError(
            f"the ranks of site {notes.index(MIXED)} have states of different steps, and no site has a whole "
            "one: give all ranks states of one step, or None to begin anew"
        )
    if not found:
        return None
    source = max(found, key=lambda each: (*_age(found[each]), -each))
    newest = found[source]
    current = {each: own for each, own in found.items() if _is_current(own, newest, warmup_steps)}
    # Fragments have one order on all sites: those that have begun as many average no others.
    assert all(own.turn.under_way.keys() <= newest.turn.under_way.keys() for own in current.values())
    keeps_means = all(_has_means_of(own.turn, newest.turn) for own in current.values())
    return Newest(
        newest,
        source,
        is_current=site in current,
        is_everywhere=len(current) == len(notes) and keeps_means,
        is_apart=site in found and _is_apart(found[site], newest),
    )


def _age(position: Position) -> tuple[int, ...]:
    turn = position.turn
    return turn.num_averages, len(turn.under_way), turn.num_begun, position.num_steps


def _is_current(own: Position, newest: Position, warmup_steps: int) -> bool:
    """Return True if a state has the newest averages, and has begun those whose means are under way.

    During warm-up each step is an average, so a state needs as many steps.
    """
    if _is_apart(own, newest):
        return False
    if own.num_steps < warmup_steps:
        return own.num_steps == newest.num_steps
    has_begun = not newest.turn.under_way or own.turn.num_begun >= newest.turn.num_begun
    return own.turn.num_averages == newest.turn.num_averages and has_begun


def _has_means_of(own: Turn, newest: Turn) -> bool:
    """Return True if the averagings under way are those of the newest state, in the same group."""
    return own.under_way.keys() == newest.under_way.keys() and own.group == newest.group


def _is_apart(own: Position, newest: Position) -> bool:
    """Return True if two states have as many averages, which are not the same.

    A state of the warm-up has no history, and neither has one that an older release has saved.
    """
    is_other = own.turn.history not in ("", newest.turn.history)
    return is_other and own.turn.num_averages == newest.turn.num_averages
