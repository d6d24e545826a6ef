"""The policy of ``auto``: when to look, what to try, and what to keep. Pure: it sees only reports.

Every rank has the same policy and gives it the same reports, so all ranks decide alike.

    measure   the first steps, in 16 bits. Then a report of times and errors.
    try       other choices, one after the other, beside the present one: see `ladder`. First those with fewer
              bytes, if they promise to be faster, from the coarsest on, until one is slower than the one
              before. If none of them is faster, exact gradients.
    keep      look at errors again after 50 steps, 100, 200, and so on up to ``every``. Try again as soon as
              the time of a step has changed.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from gradwire.recipes import Tuning
from gradwire.tuning.changes import notice_change
from gradwire.tuning.choices import Chooser, EncodingChoice
from gradwire.tuning.decisions import Basis, Decision
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.ladder import Ladder
from gradwire.tuning.policy_state import CHECK_EVERY, FIRST_INTERVAL, PolicyState
from gradwire.tuning.reports import StepReport, Want
from gradwire.tuning.times import NUM_NEEDED, UNKNOWN
from gradwire.tuning.trials import NUM_SETTLING as WINDOW_SETTLING
from gradwire.tuning.trials import WINDOW

# The first steps that are not timed, and those that are.
NUM_SETTLING = 3
NUM_TIMED = 8
# The first steps, in which times may still come: after a resume they need some steps.
NUM_TRIES = 40
# Steps to the next report of times after one that is off.
CHECK_SOON = 8
# A choice is made anew if its error exceeds the budget by more than this, or if others save more than this.
_OVER_BUDGET, _FEWER_BYTES, _SMALLER = 1.1, 0.9, 0.9
# The largest part of the time that ordinary looks may take.
MAX_LOOKING = 0.01


class Policy:
    """Turns reports into decisions."""

    def __init__(self, tuning: Tuning, state: PolicyState | None = None, *, needs_times: bool = True) -> None:
        """Go on from ``state``. If it does not need times, the policy decides as if only bytes counted."""
        self.state = state or PolicyState(tuning.first + 1)
        self._tuning = tuning
        self._is_other_exchange = self.state.is_scattered != tuning.is_scattered
        self.state.is_scattered = tuning.is_scattered
        self._ladder = Ladder(tuning, self.state)
        self._needs_times = needs_times and tuning.max_bytes is None
        self._fit_options()

    def resume(self, step: int, *, look_soon: bool = False) -> None:
        """Go on at ``step``, after a run was stopped.

        With ``look_soon``, end a trial that was under way, and look at errors again soon: another number of
        ranks has others. So has a reduce-scatter, if the state is not one of those.
        """
        if not (look_soon or self._is_other_exchange):
            return
        self._forget()
        if self.state.phase != "measure":
            self.state.next_look = step + NUM_SETTLING + NUM_TIMED

    def _forget(self) -> None:
        """Forget times and errors, and what follows from them; end a trial that is under way."""
        self._ladder.give_up()
        self._ladder.reopen()
        self.state.expect_steps_of()
        self.state.table, self.state.times = None, UNKNOWN

    def _fit_options(self) -> None:
        """Let a state of other options hold: encodings may have been added or left out."""
        state, names = self.state, self._tuning.names
        if state.table is not None and any(len(row) != len(names) for row in state.table.errors):
            self._forget()
            chosen = set() if state.choice is None else set(state.choice.encodings.values())
            numbers = [number for number, name in enumerate(names) if name in chosen]
            state.rung = 1 + max(numbers, default=self._tuning.first)

    def is_settling(self, step: int) -> bool:
        """Return True if the time of this step does not count."""
        num_settling = WINDOW_SETTLING if self.state.phase == "try" else NUM_SETTLING
        return step < self.state.since + num_settling

    def starts_anew(self, step: int) -> bool:
        """Return True if times of steps up to this one, whose report was the last, do not count any more."""
        return self.state.since > step or self.state.num_off > 0

    def wants(self, step: int) -> Want:
        """Return the report that the policy needs at the end of a step."""
        state = self.state
        num_steps = step - state.since + 1
        if state.phase == "try":
            return "times" if num_steps >= WINDOW else "nothing"
        if state.phase == "measure":
            is_due = num_steps >= NUM_SETTLING + NUM_TIMED and step >= state.next_look
            return "errors" if is_due else "nothing"
        if self._needs_times and num_steps < NUM_SETTLING + NUM_NEEDED:
            return "nothing"  # a report would have no times yet
        if step >= state.next_look and state.looking <= MAX_LOOKING:
            return "errors"
        return "times" if step >= state.next_check else "nothing"

    def conclude(self, step: int, report: StepReport, chooser: Chooser) -> Decision | None:
        """Take the report of a step; return a decision, if there is one. The choice may change without one.

        A report with numbers that are not finite is ignored, and so is one without times that are needed.
        """
        state = self.state
        if not report.is_finite:
            state.looking = report.looking
            self._look_less_often(step)
            return None
        if not report.times.is_known and state.trial is None:
            report = replace(report, times=state.times)
        if self._needs_times and not report.times.is_known:
            if step >= state.since + NUM_TRIES:
                self._look_less_often(step)
            return None
        state.times = report.times
        state.looking = report.looking
        self._ladder.add_credit(step)
        has_new_gradients = self._used_so_far(report.used) != state.used
        if has_new_gradients:
            state.next_look, state.looking = step + 1, 0.0
        if state.trial is not None:
            return self._ladder.follow(step, report.times, state.trial)
        has_changed = report.times.is_known and notice_change(state, report.times.step)
        state.next_check = step + (CHECK_SOON if state.num_off else CHECK_EVERY)
        if has_changed:
            self._ladder.reopen()
            state.expect_steps_of(report.times.step)
            state.interval = min(FIRST_INTERVAL, self._tuning.every)
            state.next_look = min(state.next_look, step + state.interval)
        if report.table is not None:
            return self._look(step, report, report.table, chooser)
        table = state.table
        if not has_changed or has_new_gradients or table is None or len(table.norms) != len(chooser.units):
            return None
        return self._ladder.search(step, report.times, table, chooser)

    def _look_less_often(self, step: int) -> None:
        """Look again after a step, then two, four and so on.

        A loss scale may overflow for many steps. And there are no times while nobody waits for averages.
        """
        state, longest = self.state, min(FIRST_INTERVAL, self._tuning.every)
        state.next_look, state.retry = step + state.retry, min(2 * state.retry, longest)

    def _used_so_far(self, used: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return the units that have had gradients, by now or before; units change with the buckets."""
        before = self.state.used if len(self.state.used) == len(used) else (False,) * len(used)
        return tuple(map(operator.or_, before, used))

    def _look(self, step: int, report: StepReport, table: ErrorTable, chooser: Chooser) -> Decision | None:
        """Decide from new errors and times."""
        state, is_first = self.state, self.state.phase == "measure"
        state.used, state.table, state.phase = self._used_so_far(report.used), table, "keep"
        state.apart = chooser.apart(table)
        state.retry = 1
        interval = min(state.interval, self._tuning.every)
        state.next_look, state.interval = step + interval, min(2 * interval, self._tuning.every)
        now = chooser.reassess(state.choice, table)
        rung = state.rung if self._needs_times else len(self._tuning.encodings)
        target = chooser.best(table, rung)
        at = Basis(step, report.times, now.num_bytes)
        if (reason := self._why_anew(now, target)) or (is_first and not self._needs_times):
            state.expect_steps_of()
            return state.decide(at, reason or self._why_these_bytes(target), target, rung)
        if not self._needs_times:
            return None
        decision = self._ladder.search(step, report.times, table, chooser)
        if decision is None and is_first:
            coarsest = chooser.best(table, self._ladder.coarsest)
            decision = state.decide(at, _why_not(at, coarsest), now, state.rung, at.times.step)
            state.times = at.times  # the choice is the same
        return decision

    def _why_anew(self, now: EncodingChoice, target: EncodingChoice) -> str:
        """Return the reason to change to ``target``; empty if there is none."""
        if (limit := self._tuning.max_bytes) is not None:
            is_over = now.num_bytes > max(limit, target.num_bytes)
            # A smaller error is worth a change too.
            is_stale = is_over or (target.error or 0.0) < _SMALLER * (now.error or 0.0)
            return self._why_these_bytes(target) if is_stale else ""
        if now.error is not None and now.error > _OVER_BUDGET * self._tuning.budget:
            return "the error left the budget"
        return "fewer bytes keep the budget" if target.num_bytes < _FEWER_BYTES * now.num_bytes else ""

    def _why_these_bytes(self, target: EncodingChoice) -> str:
        if (limit := self._tuning.max_bytes) is None:
            return "fewest bytes within the budget"
        is_within = target.num_bytes <= limit
        return (
            "smallest error with these bytes"
            if is_within
            else "even the coarsest encodings exceed these bytes"
        )


def _why_not(at: Basis, coarsest: EncodingChoice) -> str:
    """Return the reason why no choice is tried."""
    if coarsest.num_bytes > _FEWER_BYTES * at.num_bytes:
        return "nothing coarser keeps the budget"
    return f"{at.times.share_exposed:.0%} of a step is communication: not worth coarser gradients"
