"""Trials: a choice is compared with the present one in short windows of steps that alternate.

Windows follow one another as A B A B A, where A is the present choice. A window of B is compared with the
windows of A before and after it, so that a machine that becomes slower does not count against B. B may win at
once, and loses after a window of A. After the first two windows of B, only a large difference is believed.
After that, windows are counted: see Note [Which choice wins].

Note [Which choice wins]: times of windows differ by some percent for no reason. Let finer gradients win if
they seem to be as fast in one window of two. Then B, C and D, each finer and a little slower than the one
before, may all win, and a step takes much longer than with A. So a choice that is no faster must show it in
five windows, before it is slower in three. One that is faster, by what coarser gradients are worth, needs
three windows, before it has missed the mark in three.

Note [Cost of trials]: a trial loses time if B is slower. What it loses is counted in steps of A, and paid
from a credit, which is `MAX_CREDIT` steps at first and grows by `REFILL` steps a step up to that. A trial
begins only while there is credit. So in n steps, trials lose at most ``MAX_CREDIT + REFILL * n`` steps' time
and the loss of one trial more. Let B take r times as long as A. Then the loss of a trial is at most
``WINDOW * (r - 1)`` steps if r exceeds 1.3, for it ends after one window. Otherwise it is at most
``3 * WINDOW * (r - 1)``, and up to seven windows' if noise hides it.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from gradwire.tuning.choices import EncodingChoice

# Steps of a window; the first of them is not timed.
WINDOW, NUM_SETTLING = 6, 1
MAX_CREDIT = 20.0
REFILL = 0.01
# A gain below 3 % is not worth coarser gradients. Finer ones are welcome if they cost nothing.
WORTH_IT, _NOT_SLOWER = 0.97, 1.0
# After the first window of B and after the second, a ratio of times that is off the mark by this factor.
_AT_ONCE = (1.3, 1.1)
# Windows of B that are faster, that are not slower, and that miss the mark.
_NUM_FASTER, _NUM_NOT_SLOWER, _NUM_MISSED = 3, 5, 3


@dataclass(frozen=True)
class Candidate:
    """A choice that may become the present one."""

    rung: int
    choice: EncodingChoice
    expected: float
    """Seconds of a step, as predicted."""


@dataclass(frozen=True)
class Trial:
    """A trial under way: the present choice, its challengers, and what the first of them has shown."""

    kept: Candidate
    challengers: tuple[Candidate, ...]
    """The choices to try, one after the other; the first of them is being tried."""
    kept_s: tuple[float, ...]
    """Seconds of a step in each window of ``kept``."""
    new_s: tuple[float, ...] = ()
    """Seconds of a step in each window of the challenger."""

    @property
    def challenger(self) -> Candidate:
        return self.challengers[0]

    @property
    def current(self) -> Candidate:
        """The choice of the present window."""
        return self.kept if len(self.new_s) == len(self.kept_s) else self.challenger

    @property
    def ratios(self) -> list[float]:
        """How many times as long a step takes with the challenger, by each of its windows."""
        after = (*self.kept_s[1:], self.kept_s[-1])
        return [2 * new / sum(around) for new, *around in zip(self.new_s, self.kept_s, after, strict=False)]

    @property
    def loss(self) -> float:
        """Steps of ``kept`` that the challenger has lost in its window before the last one of ``kept``."""
        before, after = self.kept_s[-2:]
        return WINDOW * max(0.0, 2 * self.new_s[-1] / (before + after) - 1)

    def verdict(self) -> bool | None:
        """Return True if the challenger has won, False if it has lost, and None to go on."""
        ratios, is_finer = self.ratios, self.challenger.rung < self.kept.rung
        mark = _NOT_SLOWER if is_finer else WORTH_IT
        clearly = _AT_ONCE[len(ratios) - 1] if len(ratios) <= len(_AT_ONCE) else math.inf
        num_faster = sum(ratio <= WORTH_IT for ratio in ratios)
        num_missed = sum(ratio > mark for ratio in ratios)
        if statistics.median(ratios) <= mark / clearly or num_faster >= _NUM_FASTER:
            return True
        if is_finer and len(ratios) - num_missed >= _NUM_NOT_SLOWER:
            return True
        has_seen_both = len(self.kept_s) > len(self.new_s)
        is_lost = statistics.median(ratios) > mark * clearly or num_missed >= _NUM_MISSED
        return False if has_seen_both and is_lost else None
