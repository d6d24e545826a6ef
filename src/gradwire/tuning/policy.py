"""The policy of ``auto``: when to look, what to try, and what to keep. Pure: it sees only reports.

Every rank has the same policy and gives it the same reports, so all ranks decide alike.

    measure   the first steps, in the finest encoding. Then a report of times and errors. If communication is
              hidden, keep that encoding; if not, try the choice with the fewest bytes.
    try       a few steps with a new choice. If a step takes longer than predicted, encoding costs more than
              it saves: try without the coarsest encoding. Then keep the fastest choice, and the finest of
              those that are about as fast.
    keep      look again after 50 steps, 100, 200, and so on up to ``every``; and as soon as the time of a
              step, or the set of parameters with gradients, has changed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwire.recipes import Tuning
from gradwire.tuning.choices import Choosing, EncodingChoice
from gradwire.tuning.decisions import Decision
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.policy_state import FIRST_INTERVAL, PolicyState, StepReport, Trial, Want
from gradwire.tuning.times import UNKNOWN, Times

# Steps after a change that are not timed, and steps that are.
NUM_SETTLING = 3
NUM_TIMED = 8
# Steps between two reports of times. They are a message of a few bytes.
CHECK_EVERY = 25
# A gain below 3 % is not worth coarser gradients; to leave the finest encoding later, 5 % are needed.
_WORTH_IT, _WORTH_A_CHANGE = 0.97, 0.95
# Step times that differ by less count as equal, and a prediction as met.
_AS_FAST, _AS_PREDICTED = 1.03, 1.05
# Communication in the finest encoding counts as hidden if it makes a step longer by less than this.
_HIDDEN = 1.01
# A choice is made anew if its error exceeds the budget by more than this, or if others save more than this.
_OVER_BUDGET, _FEWER_BYTES, _SMALLER = 1.1, 0.9, 0.9
# The step time has changed if it is off by these factors in two reports, one after the other.
_SLOWER, _FASTER, _NUM_OFF = 1.3, 0.75, 2


@dataclass(frozen=True)
class _Measured:
    """The step, times and bytes that a decision follows from."""

    step: int
    times: Times
    num_bytes: int

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes a second that were sent while buckets were averaged: the link has at least this rate."""
        return float(round(self.num_bytes / self.times.averaging)) if self.times.averaging else None


@dataclass(frozen=True)
class _Look(_Measured):
    """One look: what was measured, and the choices that there are."""

    table: ErrorTable
    fine: EncodingChoice
    """The finest encoding for all."""
    now: EncodingChoice
    """The present choice, with its present error."""
    target: EncodingChoice
    """The choice with the fewest bytes within the budget."""


class Policy:
    """Turns reports into decisions."""

    def __init__(self, tuning: Tuning, state: PolicyState | None = None, *, needs_times: bool = True) -> None:
        """Go on from ``state``. If it does not need times, the policy decides as if only bytes counted."""
        self.state = state or PolicyState()
        self._tuning = tuning
        self._num_encodings = len(tuning.encodings)
        self._needs_times = needs_times and tuning.max_bytes is None

    def resume(self, step: int, *, look_soon: bool = False) -> None:
        """Go on at ``step``, after a run was stopped.

        With ``look_soon``, end a trial that was under way, and look at errors again soon: another number of
        ranks has others.
        """
        state = self.state
        if look_soon and state.phase != "measure":
            state.phase, state.trial, state.next_look = "keep", None, step + NUM_SETTLING + NUM_TIMED
        if look_soon:
            state.settled, state.num_off = UNKNOWN, 0

    def is_settling(self, step: int) -> bool:
        """Return True if the time of this step does not count."""
        return step < self.state.since + NUM_SETTLING

    def wants(self, step: int) -> Want:
        """Return the report that the policy needs at the end of a step."""
        state = self.state
        num_steps = step - state.since + 1
        if state.phase == "keep":
            if step >= state.next_look:
                return "errors"
            return "times" if num_steps % CHECK_EVERY == 0 else "nothing"
        if num_steps < NUM_SETTLING + NUM_TIMED:
            return "nothing"
        return "errors" if state.phase == "measure" else "times"

    def conclude(self, step: int, report: StepReport, choosing: Choosing) -> Decision | None:
        """Take the report of a step; return a decision, if there is one.

        A report with numbers that are not finite is ignored, and one without times that are needed. The
        policy then wants another from the next step.
        """
        state = self.state
        if not report.is_finite or (self._needs_times and not report.times.is_known):
            return None
        if state.phase == "try":
            return self._conclude_trial(step, report.times, choosing)
        if self._has_changed(report.times):
            state.limit, state.stays_coarse, state.interval = (
                0,
                False,
                min(FIRST_INTERVAL, self._tuning.every),
            )
            state.next_look = step + 1
        if report.table is None:
            if self._has_new_gradients(report.used):
                state.next_look = step + 1
            return None
        state.used = self._used_so_far(report.used)
        state.next_look, state.interval = step + state.interval, min(2 * state.interval, self._tuning.every)
        decision = self._look(step, report.times, report.table, choosing)
        if state.phase == "measure":
            state.phase, state.since = "keep", step + 1
        if decision is not None:
            state.settled, state.num_off = UNKNOWN, 0
        return decision

    def _used_so_far(self, used: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return the units that have had gradients, by now or before; units change with the buckets."""
        before = self.state.used if len(self.state.used) == len(used) else (False,) * len(used)
        return tuple(map(operator.or_, before, used))

    def _has_new_gradients(self, used: tuple[bool, ...]) -> bool:
        return self._used_so_far(used) != self.state.used

    def _look(self, step: int, times: Times, table: ErrorTable, choosing: Choosing) -> Decision | None:
        """Decide from new errors and times."""
        state = self.state
        fine = choosing.finest(table)
        now = fine if state.choice is None else choosing.again(state.choice, table)
        target = choosing.best(table, state.limit or self._num_encodings)
        seen = _Look(step, times, now.num_bytes, table, fine, now, target)
        if not self._needs_times:
            return self._count_bytes(seen)
        if now.num_bytes == fine.num_bytes:
            return self._leave_finest(seen)
        return self._stay_coarse(seen)

    def _count_bytes(self, seen: _Look) -> Decision | None:
        """Decide without times."""
        limit, reason = self._tuning.max_bytes, "fewest bytes within the budget"
        if limit is not None:
            reason = "smallest error with these bytes"
            if seen.target.num_bytes > limit:
                reason = "even the coarsest encodings exceed these bytes"
        is_over = limit is not None and seen.now.num_bytes > max(limit, seen.target.num_bytes)
        if self.state.phase == "measure" or is_over or self._is_stale(seen):
            return self._decide(seen, reason, seen.target, self._num_allowed)
        return None

    def _leave_finest(self, seen: _Look) -> Decision | None:
        """Try the choice with the fewest bytes, if that promises to be faster."""
        times, is_first = seen.times, self.state.phase == "measure"
        reason = f"{times.exposed / times.step:.0%} of a step is communication"
        expected = times.predict(seen.now.num_bytes, seen.target.num_bytes)
        if expected <= (_WORTH_IT if is_first else _WORTH_A_CHANGE) * times.step:
            self._begin_trial(seen)
            return self._decide(seen, reason, seen.target, self._num_allowed, expected)
        if not is_first:
            return None
        reason += ": not worth coarser gradients"
        if seen.target.num_bytes > _FEWER_BYTES * seen.fine.num_bytes:
            reason = "nothing coarser keeps the budget"
        return self._decide(seen, reason, seen.fine, 1, times.step)

    def _stay_coarse(self, seen: _Look) -> Decision | None:
        """Try the finest encoding, if that may be as fast; choose anew, if the choice is stale."""
        times = seen.times
        back = times.predict(seen.now.num_bytes, seen.fine.num_bytes)
        if back <= _HIDDEN * times.step and not self.state.stays_coarse:
            self._begin_trial(seen)
            return self._decide(seen, "finer gradients may cost nothing", seen.fine, 1, back)
        if not self._is_stale(seen):
            return None
        is_over = seen.now.error is not None and seen.now.error > self._tuning.budget
        reason = "the error left the budget" if is_over else "fewer bytes keep the budget"
        return self._decide(seen, reason, seen.target, self._num_allowed)

    @property
    def _num_allowed(self) -> int:
        return self.state.limit or self._num_encodings

    def _is_stale(self, seen: _Look) -> bool:
        now, target = seen.now, seen.target
        if self._tuning.max_bytes is not None:  # then the error is what can become smaller
            return (target.error or 0.0) < _SMALLER * (now.error or 0.0)
        is_over = now.error is not None and now.error > _OVER_BUDGET * self._tuning.budget
        return is_over or target.num_bytes < _FEWER_BYTES * now.num_bytes

    def _begin_trial(self, seen: _Look) -> None:
        tried = {self.state.num_allowed: seen.times.step}
        self.state.trial = Trial(seen.table, seen.times, seen.now.num_bytes, tried)
        self.state.phase = "try"

    def _conclude_trial(self, step: int, times: Times, choosing: Choosing) -> Decision | None:
        """Keep what was tried if it is as fast as predicted; if not, try a finer choice or take the best."""
        state, trial = self.state, self.state.trial
        assert trial is not None
        last = state.decisions[-1]
        state.decisions[-1] = last = replace(last, got_ms=_ms(times.step))
        tried = {**trial.tried, state.num_allowed: times.step}
        state.trial, at = replace(trial, tried=tried), _Measured(step, times, last.bytes_per_step)
        expected_s = 1e-3 * (last.expected_ms or math.inf)
        if times.step > _AS_PREDICTED * expected_s:
            for num_allowed in range(state.num_allowed - 1, 1, -1):
                choice = choosing.best(trial.table, num_allowed)
                if num_allowed not in tried and choice.encodings != last.encodings:
                    expected = trial.times.predict(trial.num_bytes, choice.num_bytes)
                    reason = "slower than predicted: try without the coarsest"
                    return self._decide(at, reason, choice, num_allowed, expected)
        fastest = min(tried.values())
        kept = min(number for number, seconds in tried.items() if seconds <= _AS_FAST * fastest)
        state.phase, state.since, state.num_off, state.trial = "keep", step + 1, 0, None
        state.limit, state.stays_coarse = max(1, kept), kept > 1 and 1 in tried and len(tried) > 1
        if times.step <= _AS_PREDICTED * expected_s and kept == state.num_allowed and len(tried) == 2:
            state.limit = 0  # nothing was found to be slow
        if kept == state.num_allowed:
            state.settled = times
            return None
        # If it is slower now than it was, the machine has become slower, and the trial was unfair.
        state.settled = replace(trial.times, step=tried[kept])
        choice = choosing.finest(trial.table) if kept == 1 else choosing.best(trial.table, kept)
        return self._decide(at, "faster before", choice, kept, tried[kept])

    def _has_changed(self, times: Times) -> bool:
        """Return True if the time of a step is no longer that of the present choice at first."""
        state = self.state
        if not (times.is_known and state.settled.is_known):
            state.settled = times
            return False
        ratio = times.step / state.settled.step
        state.num_off = state.num_off + 1 if ratio > _SLOWER or ratio < _FASTER else 0
        if state.num_off < _NUM_OFF:
            return False
        state.settled, state.num_off = times, 0
        return True

    def _decide(
        self,
        at: _Measured,
        reason: str,
        choice: EncodingChoice,
        num_allowed: int,
        expected_s: float | None = None,
    ) -> Decision:
        self.state.choice, self.state.num_allowed, self.state.since = choice, num_allowed, at.step + 1
        known = at.times if at.times.is_known else None
        decision = Decision(
            step=at.step,
            reason=reason,
            step_ms=None if known is None else _ms(known.step),
            exposed_ms=None if known is None else _ms(known.exposed),
            bytes_per_s=None if known is None else at.bytes_per_s,
            encodings=dict(choice.encodings),
            error=choice.error,
            bytes_per_step=choice.num_bytes,
            expected_ms=None if expected_s is None else _ms(expected_s),
        )
        self.state.decisions.append(decision)
        return decision


def combine_used(ranks: Sequence[Sequence[bool]]) -> tuple[bool, ...]:
    """Return, for each unit, True if it is used on any rank."""
    return tuple(map(any, zip(*ranks, strict=True)))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
