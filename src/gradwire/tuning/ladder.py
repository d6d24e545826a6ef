"""The ladder: choices from fewer and fewer fine encodings, of which trials find the fastest.

A *rung* is a number of encodings, counted from the finest: the choice of rung 3 is made from the three
finest. Encoding costs more the coarser it is, and sending less. So the time of a step first falls and then
rises from rung to rung. What is slower than the present choice closes its side: nothing beyond it is tried.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from gradwire.recipes import Tuning
from gradwire.tuning.choices import Chooser
from gradwire.tuning.decisions import Basis, Decision, to_ms
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.policy_state import PolicyState
from gradwire.tuning.times import Times
from gradwire.tuning.trials import MAX_CREDIT, REFILL, WORTH_IT, Candidate, Trial

# A choice is steady if its first and its last window in a trial differ by no more than this.
_STEADY = 0.3


class Ladder:
    """Tries the choices of other rungs, and keeps the fastest; works on the state of a policy."""

    def __init__(self, tuning: Tuning, state: PolicyState) -> None:
        self._tuning = tuning
        self._state = state

    @property
    def coarsest(self) -> int:
        """The coarsest rung that may be the fastest."""
        return self._state.coarsest or len(self._tuning.encodings)

    def reopen(self) -> None:
        """Forget which choices were slower."""
        self._state.finest, self._state.coarsest = 1, 0

    def add_credit(self, step: int) -> None:
        """Let the credit grow up to a step: see Note [Cost of trials]."""
        state = self._state
        state.credit = min(MAX_CREDIT, state.credit + REFILL * (step - state.credited))
        state.credited = step

    def search(self, step: int, times: Times, table: ErrorTable, chooser: Chooser) -> Decision | None:
        """Begin to try choices that promise to be faster, or are finer and not known to be slower."""
        state = self._state
        now = chooser.reassess(state.choice, table)
        coarser = range(self.coarsest, state.rung, -1)
        finer = range(state.rung - 1, state.finest - 1, -1)
        challengers: list[Candidate] = []
        for rung in (*coarser, *finer):
            choice = chooser.best(table, rung)
            expected = times.predict(now.num_bytes, choice.num_bytes)
            is_known = choice.num_bytes in {now.num_bytes, *(each.choice.num_bytes for each in challengers)}
            is_promising = rung in finer or expected <= WORTH_IT * times.step
            if is_promising and not is_known:
                challengers.append(Candidate(rung, choice, expected))
        if not challengers or state.credit <= 0:
            return None
        kept = Candidate(state.rung, now, times.step)
        state.trial, state.phase = Trial(kept, tuple(challengers), (times.step,)), "try"
        reason = f"{times.share_exposed:.0%} of a step is communication"
        return self._try(Basis(step, times, now.num_bytes), challengers[0], reason)

    def follow(self, step: int, times: Times, trial: Trial) -> Decision | None:
        """Take a window's time; go on with the next window, the next challenger or the best choice."""
        state = self._state
        at = Basis(step, times, trial.current.choice.num_bytes)
        if trial.current is trial.kept:
            trial = replace(trial, kept_s=(*trial.kept_s, times.step))
            state.credit -= trial.loss
        else:
            trial = replace(trial, new_s=(*trial.new_s, times.step))
        has_won = trial.verdict()
        if has_won is None:
            state.trial = trial
            state.use(step, trial.current.choice, trial.current.rung)
            return None
        got_ms = to_ms(statistics.median(trial.new_s))
        state.decisions[-1] = replace(state.decisions[-1], got_ms=got_ms)
        return self._end(at, trial, has_won=has_won)

    def give_up(self) -> None:
        """End a trial that is under way, and go back to the choice before it."""
        state, trial = self._state, self._state.trial
        if trial is not None:
            state.choice, state.rung = trial.kept.choice, trial.kept.rung
            state.trial, state.phase = None, "keep"

    def _end(self, at: Basis, trial: Trial, *, has_won: bool) -> Decision | None:
        """Keep the winner of a trial; try the next challenger beside it, if there is one."""
        state, times = self._state, at.times  # of the last window, which was one of the winner
        kept, kept_s = (trial.challenger, trial.new_s) if has_won else (trial.kept, trial.kept_s)
        is_steady = abs(kept_s[-1] - kept_s[0]) <= _STEADY * kept_s[0]
        if is_steady:
            self._close_side(trial, has_won=has_won)
            rest = [each for each in trial.challengers[1:] if state.finest <= each.rung <= self.coarsest]
            if rest and state.credit > 0:
                state.trial = Trial(kept, tuple(rest), kept_s[-1:])
                expected = times.predict(kept.choice.num_bytes, rest[0].choice.num_bytes)
                challenger = replace(rest[0], expected=expected)
                return self._try(at, challenger, "faster" if has_won else "not faster")
        else:
            self.reopen()  # trials until now tell nothing of what is slower from now on
        state.trial, state.phase = None, "keep"
        decision = None
        if has_won:
            state.use(at.step, kept.choice, kept.rung)
        else:
            decision = state.decide(at, "faster before", kept.choice, kept.rung, kept_s[-1])
        state.times = times
        state.expect_steps_of(kept_s[0])  # the first window, so that a change since then is noticed
        return decision

    def _try(self, at: Basis, challenger: Candidate, reason: str) -> Decision:
        if challenger.rung == 1 and self._tuning.names[0] == "fp32":
            reason += ": try exact gradients"
        return self._state.decide(at, reason, challenger.choice, challenger.rung, challenger.expected)

    def _close_side(self, trial: Trial, *, has_won: bool) -> None:
        """Remember on which side of the loser the fastest rung cannot be."""
        state, winner, loser = self._state, trial.challenger.rung, trial.kept.rung
        if not has_won:
            winner, loser = loser, winner
        if winner > loser:
            state.finest = max(state.finest, loser + 1)
        else:
            state.coarsest = min(self.coarsest, loser - 1)
