"""The policy of ``auto``: when to look, what to try, and what to keep. Pure: it sees only reports.

Every rank has the same policy and gives it the same reports, so all ranks decide alike.

    measure   the first steps, in 16 bits. Then a report of times and errors.
    try       other choices, one after the other, beside the present one: see `trials`. First those with fewer
              bytes, if they promise to be faster, from the coarsest on, until one is slower than the one
              before. If none of them is faster, exact gradients.
    keep      look at errors again after 50 steps, 100, 200, and so on up to ``every``. Try again as soon as
              the time of a step has changed.

Encoding costs more the coarser it is, and sending less. So the time of a step first falls and then rises from
rung to rung. What is slower than the present choice closes its side: nothing beyond it is tried.
"""

from __future__ import annotations

import operator
import statistics
from dataclasses import dataclass, replace

from gradwire.recipes import Tuning
from gradwire.tuning.choices import Choosing, EncodingChoice
from gradwire.tuning.decisions import Decision
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.policy_state import FIRST_INTERVAL, PolicyState
from gradwire.tuning.reports import StepReport, Want
from gradwire.tuning.times import NUM_NEEDED, UNKNOWN, Times
from gradwire.tuning.trials import MAX_CREDIT, REFILL, WINDOW, WORTH_IT, Candidate, Trial
from gradwire.tuning.trials import NUM_SETTLING as WINDOW_SETTLING

# The first steps that are not timed, and those that are.
NUM_SETTLING = 3
NUM_TIMED = 8
# Steps between two reports of times. They are a message of a few bytes. One that is off is followed soon.
CHECK_EVERY, CHECK_SOON = 25, 8
# A choice is made anew if its error exceeds the budget by more than this, or if others save more than this.
_OVER_BUDGET, _FEWER_BYTES, _SMALLER = 1.1, 0.9, 0.9
# The step time has changed if two reports, one after the other, are off by more than 10 %, and by more than
# four times what the first reports differ. While these are few, by more than 30 %.
_OFF, _OFF_AT_FIRST, _NUM_DEVIATIONS, _NUM_FEW, _NUM_RECENT, _NUM_OFF = 0.1, 0.3, 4, 4, 8, 2
# The largest part of the time that ordinary looks may take.
MAX_LOOKING = 0.01


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


class Policy:
    """Turns reports into decisions."""

    def __init__(self, tuning: Tuning, state: PolicyState | None = None, *, needs_times: bool = True) -> None:
        """Go on from ``state``. If it does not need times, the policy decides as if only bytes counted."""
        self.state = state or PolicyState(tuning.first + 1)
        self._tuning = tuning
        self._is_other_exchange = self.state.is_scattered != tuning.is_scattered
        self.state.is_scattered = tuning.is_scattered
        self._num_encodings = len(tuning.encodings)
        self._needs_times = needs_times and tuning.max_bytes is None
        self._fit_options()

    def resume(self, step: int, *, look_soon: bool = False) -> None:
        """Go on at ``step``, after a run was stopped.

        With ``look_soon``, end a trial that was under way, and look at errors again soon: another number of
        ranks has others. So has a reduce-scatter, if the state is not one of those.
        """
        if not (look_soon or self._is_other_exchange):
            return
        self._end_trial()
        self.state.table = None  # its columns may be those of other encodings
        self.state.times = UNKNOWN
        if self.state.phase != "measure":
            self.state.next_look = step + NUM_SETTLING + NUM_TIMED
        self._reopen(())

    def _end_trial(self) -> None:
        """Go back to the choice that another one was tried beside, if there is a trial."""
        state = self.state
        if state.trial is not None:
            state.choice, state.rung, state.trial = state.trial.kept.choice, state.trial.kept.rung, None
            state.phase = "keep"

    def _fit_options(self) -> None:
        """Let a state of other options hold: encodings may have been added or left out."""
        state, names = self.state, self._tuning.names
        if state.table is not None and any(len(row) != len(names) for row in state.table.errors):
            self._end_trial()
            self._reopen(())
            state.table = None
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

    def conclude(self, step: int, report: StepReport, choosing: Choosing) -> Decision | None:
        """Take the report of a step; return a decision, if there is one. The choice may change without one.

        A report with numbers that are not finite is ignored, and so is one without times that are needed.
        """
        state = self.state
        if not report.is_finite:
            state.looking = report.looking
            self._wait_for_finite_gradients(step)
            return None
        if not report.times.is_known and state.trial is None:
            report = replace(report, times=state.times)
        if self._needs_times and not report.times.is_known:
            return None
        state.times = report.times
        state.credit = min(MAX_CREDIT, state.credit + REFILL * (step - state.credited))
        state.credited, state.looking = step, report.looking
        has_new_gradients = self._used_so_far(report.used) != state.used
        if has_new_gradients:
            state.next_look, state.looking = step + 1, 0.0
        if state.trial is not None:
            return self._follow_trial(step, report.times, state.trial)
        has_changed = self._has_changed(report.times)
        state.next_check = step + (CHECK_SOON if state.num_off else CHECK_EVERY)
        if has_changed:
            self._reopen((report.times.step,))
            state.interval = min(FIRST_INTERVAL, self._tuning.every)
            state.next_look = min(state.next_look, step + state.interval)
        if report.table is not None:
            return self._look(step, report, report.table, choosing)
        table = state.table
        if not has_changed or has_new_gradients or table is None or len(table.norms) != len(choosing.units):
            return None
        return self._search(step, report.times, table, choosing)

    def _wait_for_finite_gradients(self, step: int) -> None:
        """Look again after a step, then two, four and so on: a loss scale may overflow for many steps."""
        state, longest = self.state, min(FIRST_INTERVAL, self._tuning.every)
        state.next_look, state.retry = step + state.retry, min(2 * state.retry, longest)

    def _used_so_far(self, used: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return the units that have had gradients, by now or before; units change with the buckets."""
        before = self.state.used if len(self.state.used) == len(used) else (False,) * len(used)
        return tuple(map(operator.or_, before, used))

    def _look(self, step: int, report: StepReport, table: ErrorTable, choosing: Choosing) -> Decision | None:
        """Decide from new errors and times."""
        state, is_first = self.state, self.state.phase == "measure"
        state.used, state.table, state.phase = self._used_so_far(report.used), table, "keep"
        state.retry = 1
        interval = min(state.interval, self._tuning.every)
        state.next_look, state.interval = step + interval, min(2 * interval, self._tuning.every)
        now = choosing.again(state.choice, table)
        rung = state.rung if self._needs_times else self._num_encodings
        target = choosing.best(table, rung)
        at = _Measured(step, report.times, now.num_bytes)
        if (reason := self._why_anew(now, target)) or (is_first and not self._needs_times):
            state.recent, state.num_off = (), 0
            return self._decide(at, reason or self._why_these_bytes(target), target, rung)
        if not self._needs_times:
            return None
        return self._search(step, report.times, table, choosing, is_first=is_first)

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

    def _search(
        self, step: int, times: Times, table: ErrorTable, choosing: Choosing, *, is_first: bool = False
    ) -> Decision | None:
        """Begin to try choices that promise to be faster, or are finer and not known to be slower."""
        state = self.state
        now = choosing.again(state.choice, table)
        at = _Measured(step, times, now.num_bytes)
        rungs = (*range(self._coarsest, state.rung, -1), *range(state.rung - 1, state.finest - 1, -1))
        candidates: list[Candidate] = []
        for rung in rungs:
            choice = choosing.best(table, rung)
            expected = times.predict(now.num_bytes, choice.num_bytes)
            known = {now.num_bytes, *(each.choice.num_bytes for each in candidates)}
            is_promising = rung < state.rung or expected <= WORTH_IT * times.step
            if is_promising and choice.num_bytes not in known:
                candidates.append(Candidate(rung, choice, expected))
        reason = f"{times.exposed / times.step:.0%} of a step is communication"
        if candidates and state.credit > 0:
            kept = Candidate(state.rung, now, times.step)
            state.trial, state.phase = Trial(kept, tuple(candidates), (times.step,)), "try"
            return self._try(at, candidates[0], reason)
        if not is_first:
            return None
        reason += ": not worth coarser gradients"
        if choosing.best(table, self._coarsest).num_bytes > _FEWER_BYTES * now.num_bytes:
            reason = "nothing coarser keeps the budget"
        decision = self._decide(at, reason, now, state.rung, times.step)
        state.times = times  # the choice is the same
        return decision

    def _try(self, at: _Measured, candidate: Candidate, reason: str) -> Decision:
        if candidate.rung == 1 and self._tuning.names[0] == "fp32":
            reason += ": try exact gradients"
        return self._decide(at, reason, candidate.choice, candidate.rung, candidate.expected)

    def _follow_trial(self, step: int, times: Times, trial: Trial) -> Decision | None:
        """Take a window's time; go on with the next window, the next challenger or the best choice."""
        state = self.state
        at = _Measured(step, times, trial.current.choice.num_bytes)
        if trial.current is trial.kept:
            trial = replace(trial, kept_s=(*trial.kept_s, times.step))
            state.credit -= trial.loss
        else:
            trial = replace(trial, new_s=(*trial.new_s, times.step))
        has_won = trial.verdict()
        if has_won is None:
            state.trial = trial
            self._use(step, trial.current.choice, trial.current.rung)
            return None
        state.decisions[-1] = replace(state.decisions[-1], got_ms=_ms(statistics.median(trial.new_s)))
        kept, kept_s = (trial.challenger, trial.new_s) if has_won else (trial.kept, trial.kept_s)
        is_steady = abs(kept_s[-1] - kept_s[0]) <= _OFF_AT_FIRST * kept_s[0]
        if is_steady:
            self._close_side(trial, has_won=has_won)
            rest = [each for each in trial.challengers[1:] if state.finest <= each.rung <= self._coarsest]
            if rest and state.credit > 0:
                state.trial = Trial(kept, tuple(rest), kept_s[-1:])
                # The last window was one of the choice that is kept, so its times tell more than the first.
                expected = times.predict(kept.choice.num_bytes, rest[0].choice.num_bytes)
                next_one = replace(rest[0], expected=expected)
                return self._try(at, next_one, "faster" if has_won else "not faster")
        else:
            # Trials until now tell nothing of what is slower from now on.
            self._reopen(())
        # By its first window, so that a change since then is noticed.
        state.trial, state.phase, state.recent, state.num_off = None, "keep", kept_s[:1], 0
        decision = None
        if has_won:
            self._use(step, kept.choice, kept.rung)
        else:
            decision = self._decide(at, "faster before", kept.choice, kept.rung, kept_s[-1])
        state.times = times  # of the last window, which was one of the choice that is kept
        return decision

    def _close_side(self, trial: Trial, *, has_won: bool) -> None:
        """Remember on which side of the loser the fastest rung cannot be."""
        state, winner, loser = self.state, trial.challenger.rung, trial.kept.rung
        if not has_won:
            winner, loser = loser, winner
        if winner > loser:
            state.finest = max(state.finest, loser + 1)
        else:
            state.coarsest = min(self._coarsest, loser - 1)

    @property
    def _coarsest(self) -> int:
        return self.state.coarsest or self._num_encodings

    def _reopen(self, recent: tuple[float, ...]) -> None:
        """Forget which choices were slower, and how long steps took."""
        state = self.state
        state.finest, state.coarsest, state.recent, state.num_off = 1, 0, recent, 0

    def _has_changed(self, times: Times) -> bool:
        """Return True if the time of a step is no longer that of the present choice at first."""
        state, known = self.state, self.state.recent
        if known and times.is_known:
            usual = statistics.median(known)
            deviation = statistics.median(abs(each - usual) for each in known)
            limit = max(_OFF * usual, _NUM_DEVIATIONS * deviation)
            if len(known) < _NUM_FEW:
                limit = max(limit, _OFF_AT_FIRST * usual)
            if abs(times.step - usual) > limit:
                state.num_off += 1
                return state.num_off >= _NUM_OFF
        state.num_off = 0
        if times.is_known and len(known) < _NUM_RECENT:
            state.recent = (*known, times.step)
        return False

    def _decide(
        self,
        at: _Measured,
        reason: str,
        choice: EncodingChoice,
        rung: int,
        expected_s: float | None = None,
    ) -> Decision:
        self._use(at.step, choice, rung)
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
            looking=self.state.looking,
        )
        self.state.decisions.append(decision)
        return decision

    def _use(self, step: int, choice: EncodingChoice, rung: int) -> None:
        """Let a choice hold from the next step on."""
        state = self.state
        state.choice, state.rung, state.since, state.times = choice, rung, step + 1, UNKNOWN
        state.next_check = step + CHECK_EVERY


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
