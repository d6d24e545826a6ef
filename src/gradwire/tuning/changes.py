"""Changes of the time of a step, by reports that follow one another."""

from __future__ import annotations

import statistics

from gradwire.tuning.policy_state import PolicyState

# A report is off if it differs from the first ones by more than 10 %, and by more than four times what these
# differ from each other. While there are few of them, by more than 30 %.
_OFF, _NUM_DEVIATIONS = 0.1, 4
_OFF_AT_FIRST, _NUM_FEW = 0.3, 4
# The most of the first reports that are kept.
_NUM_RECENT = 8
# Reports that are off, one after the other, until a change is believed.
_NUM_OFF = 2


def notice_change(state: PolicyState, step_s: float) -> bool:
    """Take the time of a step from a report; return True if the present choice took another time at first."""
    if state.recent and _is_off(step_s, state.recent):
        state.num_off += 1
        return state.num_off >= _NUM_OFF
    state.num_off = 0
    if len(state.recent) < _NUM_RECENT:
        state.recent = (*state.recent, step_s)
    return False


def _is_off(step_s: float, recent: tuple[float, ...]) -> bool:
    usual = statistics.median(recent)
    deviation = statistics.median(abs(each - usual) for each in recent)
    limit = max(_OFF * usual, _NUM_DEVIATIONS * deviation)
    if len(recent) < _NUM_FEW:
        limit = max(limit, _OFF_AT_FIRST * usual)
    return abs(step_s - usual) > limit
