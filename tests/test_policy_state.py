"""The state of a policy of recipe `auto`: runs go on from it, and damaged ones are refused."""

import dataclasses
import json
import math

import pytest

from gradwire.tuning.policy import NUM_SETTLING, NUM_TIMED, Policy
from gradwire.tuning.reports import StepReport
from gradwire.tuning.saved import read_state, write_state
from gradwire.tuning.times import UNKNOWN
from gradwire.tuning.trials import WINDOW
from tests.simulated import Simulated

FIRST = NUM_SETTLING + NUM_TIMED - 1
"""The step at whose end the first decision falls."""


def test_a_policy_goes_on_from_its_state():
    run, resumed = Simulated(link_s=1.0), Simulated(link_s=1.0)
    run.run(230)
    run.policy.state.units = run.chooser.units
    text = write_state(run.policy.state)
    assert read_state(text) == run.policy.state
    assert write_state(read_state(text)) == text
    resumed.policy = Policy(run.tuning, read_state(text))
    resumed.policy.resume(230)
    resumed.step = 230
    for each in (run, resumed):
        each.errors |= {"int4": 0.02, "int2": 0.3}
    assert run.run(300) == resumed.run(300) != []
    assert run.last == resumed.last


def test_a_policy_that_resumes_within_a_trial_goes_on_with_it():
    runs = [
        Simulated("auto:budget=0.5", link_s=0.05, work_s={"int2": 0.05, "int3": 0.04, "int4": 0.03})
        for _ in range(2)
    ]
    for run in runs:
        run.run(FIRST + 1 + 2 * WINDOW)
        assert run.policy.state.phase == "try"
    state = read_state(write_state(runs[0].policy.state))
    assert state == runs[0].policy.state
    runs[0].policy = Policy(run.tuning, state)
    runs[0].policy.resume(run.step)
    assert runs[0].run(100) == runs[1].run(100) != []
    assert runs[0].policy.state.decisions == runs[1].policy.state.decisions


def test_another_number_of_ranks_looks_again_soon():
    run = Simulated(link_s=1.0)
    run.run(FIRST + 3)
    assert run.encodings == {"int4"}
    run.policy.resume(run.step, look_soon=True)
    assert run.encodings == {"bf16"}, "what was on trial is not kept"
    run.wanted.clear()
    run.run(20)
    assert run.wanted[0] == (FIRST + 3 + NUM_SETTLING + NUM_TIMED, "errors")


def test_a_state_of_other_options_is_taken():
    run, fewer = Simulated("auto:budget=0.5", link_s=1.0), Simulated("auto:budget=0.5,floor=int8", link_s=1.0)
    run.run(100)
    fewer.policy = Policy(fewer.tuning, read_state(write_state(run.policy.state)))
    fewer.policy.resume(100)
    fewer.step = 100
    fewer.now.link_s = 10.0
    fewer.run(200)
    assert fewer.encodings == {"int8"}


def test_a_state_with_fewer_encodings_to_choose_from_is_taken():
    run = Simulated("auto:budget=0.5,every=100", link_s=1.0)
    run.run(100)
    assert run.encodings == {"int2"}
    state = json.loads(write_state(run.policy.state))
    state["rung"] -= 1  # as it was before there was int3
    state["table"]["errors"] = [row[:4] + row[5:] for row in state["table"]["errors"]]
    run.policy = Policy(run.tuning, read_state(json.dumps(state)))
    run.policy.resume(100)
    assert run.encodings == {"int2"}
    run.now.work_s = {"int2": 1.0}
    run.run(200)
    assert run.encodings == {"int3"}, "the new encoding is tried"


def test_errors_of_other_encodings_are_not_used():
    """There are five encodings in both runs. Looks are put off, and the link becomes slow before one."""
    run = Simulated("auto:budget=0.1,every=100,floor=int3", link_s=1.0)
    run.run(100)
    other = Simulated("auto:budget=0.1,every=100,ceiling=bf16", link_s=1.0)
    other.policy = Policy(other.tuning, read_state(write_state(run.policy.state)))
    other.policy.resume(100, look_soon=True)
    other.step, other.looking = 100, 1.0
    other.run(100)
    other.now.link_s = 30.0
    other.run(200)
    assert other.encodings == run.encodings == {"int4"}, "3 bits would leave the budget"


def look(run, step, report):
    assert run.policy.conclude(step, report, run.chooser) is None
    return True


def test_reports_without_the_times_that_are_needed_are_ignored():
    run = Simulated()
    report = StepReport(UNKNOWN, run.used, run.table)
    assert run.policy.conclude(FIRST, report, run.chooser) is None
    assert run.policy.wants(FIRST + 1) == "errors"
    looked = [
        step for step in range(FIRST, 1000) if run.policy.wants(step) == "errors" and look(run, step, report)
    ]
    assert looked[-1] > 900
    assert len(looked) < 60, "without times, as if nobody waits for averages, it looks less and less often"
    run.policy = Policy(run.tuning, needs_times=False)
    assert run.policy.conclude(FIRST, report, run.chooser).step_ms is None


def test_a_state_of_an_earlier_version_is_taken():
    run = Simulated(link_s=1.0)
    run.run(100)
    state = json.loads(write_state(run.policy.state))
    for added in ("retry", "times", "units", "apart"):
        del state[added]
    taken = read_state(json.dumps(state))
    assert taken.times == UNKNOWN
    assert dataclasses.replace(taken, times=run.policy.state.times) == run.policy.state


UNIT = {"bucket": 0, "begin": 0, "numel": 8, "names": ["p"], "sizes": [8], "num_chunks": 1}
DAMAGES = {
    "no JSON": lambda state: "{",
    "a list": lambda state: "[]",
    "a field less": lambda state: json.dumps({k: v for k, v in state.items() if k != "since"}),
    "a field more": lambda state: json.dumps({**state, "more": 1}),
    "a phase": lambda state: json.dumps({**state, "phase": "sleep"}),
    "a step": lambda state: json.dumps({**state, "since": -1}),
    "a step that is none": lambda state: json.dumps({**state, "next_look": True}),
    "an encoding": lambda state: json.dumps(
        {**state, "choice": {**state["choice"], "encodings": {"a": "int5"}}}
    ),
    "a time": lambda state: json.dumps({**state, "recent": [math.nan]}),
    "a time that no float holds": lambda state: json.dumps({**state, "recent": [10**400]}),
    "a credit": lambda state: json.dumps({**state, "credit": -math.inf}),
    "a table": lambda state: json.dumps({**state, "table": {"norms": [1], "errors": [[-1]]}}),
    "names": lambda state: json.dumps({**state, "apart": [3]}),
    "a trial": lambda state: json.dumps({**state, "trial": {"kept": {}}}),
    "a trial of nothing": lambda state: json.dumps({**state, "trial": {**state["trial"], "challengers": []}}),
    "decisions": lambda state: json.dumps({**state, "decisions": [1]}),
    "a reason": lambda state: json.dumps({**state, "decisions": [{**state["decisions"][0], "reason": 3}]}),
    "used": lambda state: json.dumps({**state, "used": [1, 0]}),
    "times before": lambda state: json.dumps({**state, "times": {"step": 1}}),
    "a unit's sizes": lambda state: json.dumps({**state, "units": [{**UNIT, "sizes": [7]}]}),
    "a unit's names": lambda state: json.dumps({**state, "units": [{**UNIT, "names": [3]}]}),
    "too large a unit": lambda state: json.dumps(
        {**state, "units": [{**UNIT, "numel": 1 << 40, "sizes": [1 << 40]}]}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_is_damaged_is_refused(damage):
    run = Simulated(link_s=1.0)
    run.run(FIRST + 3)
    text = DAMAGES[damage](json.loads(write_state(run.policy.state)))
    with pytest.raises(ValueError, match="its tuning cannot be read"):
        read_state(text)
