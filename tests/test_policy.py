"""The policy of recipe `auto` in simulated runs: what it tries and keeps, and what that costs."""

import collections
import itertools
import math
import random

import pytest

from gradwire.tuning.policy import CHECK_SOON, MAX_LOOKING, NUM_SETTLING, NUM_TIMED
from gradwire.tuning.policy_state import CHECK_EVERY
from gradwire.tuning.trials import MAX_CREDIT, REFILL, WINDOW
from tests.simulated import Simulated

FIRST = NUM_SETTLING + NUM_TIMED - 1
"""The step at whose end the first decision falls."""
COARSER = ["int8", "int4", "int3", "int2"]


# --- what it chooses ---


def test_hidden_communication_stays_in_16_bits_and_says_so():
    run = Simulated(link_s=0.002)
    run.run(1000)
    assert run.encodings == {"bf16"}
    first, last = run.policy.state.decisions
    assert (first.step, first.encodings["p0"]) == (FIRST, "fp32")
    assert first.reason == "2% of a step is communication: try exact gradients"
    assert last.reason == "faster before"
    looks = [step for step, want in run.wanted if want == "errors"]
    assert looks[:3] == [FIRST, 60, 160], "50 steps, 100 steps, and so on"
    assert {after - before for before, after in itertools.pairwise(looks[2:])} == {100}


def test_looks_are_never_further_apart_than_was_asked_for():
    run = Simulated("auto:bytes=60000,every=20")
    run.run(100)
    looks = [step for step, want in run.wanted if want == "errors"]
    assert looks == [FIRST + 20 * number for number in range(5)]


def test_exact_gradients_are_kept_if_they_are_as_fast():
    run = Simulated(link_s=0.02, work_s={"bf16": 0.05, **dict.fromkeys(COARSER, 0.06)})
    run.run(150)
    assert run.encodings == {"fp32"}
    assert run.last.got_ms == pytest.approx(140)
    assert run.run(1000) == []


def test_communication_that_shows_is_compressed():
    run = Simulated(link_s=0.9)
    assert run.run(300) == [FIRST, FIRST + WINDOW, FIRST + 3 * WINDOW]
    assert run.encodings == {"int4"}
    chosen, finer, back = run.policy.state.decisions
    assert chosen.error == pytest.approx(0.07, rel=0.02)
    assert chosen.got_ms == pytest.approx(chosen.expected_ms)
    assert chosen.step_ms == pytest.approx(1000)
    assert chosen.bytes_per_s == pytest.approx(run.first.num_bytes / 0.9, rel=1e-5)
    assert set(finer.encodings.values()) == {"int8"}
    assert back.reason == "faster before"
    assert back.encodings == chosen.encodings


def test_an_encoding_that_takes_longer_than_it_saves_is_given_up():
    run = Simulated(
        "auto:budget=0.5,every=100", link_s=0.05, work_s={"int2": 0.2, "int3": 0.1, "int4": 0.004}
    )
    run.run(100)
    assert run.encodings == {"int4"}
    assert run.run(1000) == [], "it does not flap"


def test_noise_does_not_lead_it_to_finer_and_slower_choices_rung_by_rung():
    """Each encoding takes 5 % longer than the next coarser one, and that is less than windows differ."""
    found = collections.Counter()
    for seed in range(100):
        run = Simulated("auto:budget=0.5,every=500", seed, link_s=0.08, noise=0.15)
        run.run(300)
        found += collections.Counter(run.encodings)
    assert found["int2"] > 90
    assert found["int2"] + found["int3"] == 100


def test_each_prediction_is_made_from_the_choice_that_is_kept():
    run = Simulated("auto:budget=0.5", link_s=0.3, work_s={"int2": 0.01, "int3": 0.01, "int4": 0.01})
    run.run(100)
    first, second, *_ = run.policy.state.decisions
    assert second.reason == "faster"
    assert first.got_ms > first.expected_ms + 5, "the time to encode was not known"
    assert second.got_ms == pytest.approx(second.expected_ms)


def test_if_nothing_is_faster_it_goes_back_to_16_bits_for_good():
    run = Simulated("auto:budget=0.5,every=100", link_s=0.05, work_s=dict.fromkeys(COARSER, 0.12))
    run.run(100)
    assert run.encodings == {"bf16"}
    assert run.last.reason == "faster before"
    assert run.run(1000) == []


def test_a_machine_that_becomes_slower_during_a_trial_does_not_spoil_it():
    run = Simulated(link_s=0.1)
    run.run(FIRST + 1)
    run.now.compute_s = 0.115  # from here on, everything is slower
    run.run(100)
    assert run.encodings == {"int4"}
    assert run.run(500) == []


def test_a_trial_that_a_slow_minute_has_spoilt_is_repeated():
    run = Simulated(link_s=0.3)
    run.run(FIRST + 1)
    run.now.compute_s = 0.6
    run.run(3 * WINDOW)
    assert run.encodings == {"bf16"}, "it seemed to be faster before"
    run.run(400)  # the trial seemed to lose so much that the next one must wait for credit
    assert run.encodings == {"int4"}
    assert run.policy.state.phase == "keep"


def test_a_budget_that_16_bits_exceed_is_kept():
    run = Simulated("auto:budget=0.001", link_s=1.0)
    run.run(50)
    assert run.last.reason == "the error left the budget"
    assert run.encodings <= {"fp32", "bf16"}
    assert run.last.error <= 0.001


def test_a_budget_that_nothing_coarser_keeps_is_said():
    run = Simulated("auto:budget=0.004,ceiling=bf16", link_s=1.0)
    run.run(50)
    assert run.last.reason == "nothing coarser keeps the budget"


def test_a_ceiling_of_bytes_needs_no_times():
    run = Simulated("auto:bytes=60000,every=100")
    assert run.run(300) == [FIRST]
    assert 40_000 < run.last.bytes_per_step <= 60_000


# --- what it notices ---


def test_it_follows_a_link_that_becomes_slow_and_fast_again():
    work_s = {"int8": 0.01, "int4": 0.02, "int3": 0.03, "int2": 0.04}
    run = Simulated(work_s=work_s)
    run.run(200)
    assert "int4" not in run.encodings
    run.now.link_s = 1.0
    num_decisions = len(run.policy.state.decisions)
    assert run.run(CHECK_EVERY + CHECK_SOON + 1) != []
    noticed = run.policy.state.decisions[num_decisions]
    assert set(noticed.encodings.values()) == {"int4"}
    run.run(100)
    assert run.encodings == {"int4"}
    assert run.run(100) == []
    run.now.link_s = 0.0001
    run.run(CHECK_EVERY + CHECK_SOON + 16 * WINDOW)
    assert run.encodings <= {"fp32", "bf16"}, "finer gradients for nothing"
    assert run.run(1000) == []


def test_one_slow_report_changes_nothing():
    run = Simulated(link_s=0.1)
    run.run(100)
    run.now.compute_s = 0.5
    step, want = run.step, "nothing"
    while want == "nothing":
        run.run(1)
        step, want = run.wanted[-1] if run.wanted[-1][0] >= step else (step, "nothing")
    run.now.compute_s = 0.1
    assert run.run(500) == []


def test_errors_that_leave_the_budget_lead_to_another_choice():
    run = Simulated(link_s=1.0)
    run.run(200)
    run.errors |= {"int4": 0.02, "int2": 0.3}  # int4 has 0.14 now
    (_,) = run.run(110)
    assert run.encodings != {"int4"}
    assert run.last.error <= 0.1
    assert run.last.reason == "the error left the budget"


def test_a_little_more_error_changes_nothing():
    run = Simulated(link_s=1.0)
    run.run(200)
    run.errors |= {"int4": 0.0055, "int2": 0.11}
    assert run.run(400) == []


def test_parameters_that_begin_to_have_gradients_are_noticed_soon():
    run = Simulated()
    run.used = (True, False)
    run.run(400)
    wanted = len(run.wanted)
    run.used, run.looking = (True, True), 2 * MAX_LOOKING
    run.run(CHECK_EVERY + 1)
    assert "errors" in [want for _, want in run.wanted[wanted:]]
    run.used = (False, True)  # used in some steps, and not in others: nothing new
    wanted = len(run.wanted)
    run.run(CHECK_EVERY + 1)
    run.used = (True, True)
    run.run(CHECK_EVERY + 1)
    assert "errors" not in [want for _, want in run.wanted[wanted:]]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_not_finite_is_ignored(bad):
    run = Simulated(link_s=1.0)
    run.errors["int4"] = bad
    run.run(FIRST + 1)
    assert run.policy.state.decisions == []
    run.errors["int4"] = 0.005
    assert run.run(1) == [FIRST + 1], "it looks again at once"


@pytest.mark.parametrize("num_steps_before", [0, 200], ids=["at first", "later"])
def test_while_gradients_are_not_finite_it_waits_longer_and_longer(num_steps_before):
    """A loss scale that begins too high overflows in its first steps."""
    run = Simulated(link_s=1.0, compute_s=0.5)
    run.run(num_steps_before)
    good, run.errors["int4"] = run.errors["int4"], math.inf
    run.wanted.clear()
    run.run(500)
    looks = [step for step, want in run.wanted if want == "errors"]
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert gaps[:8] == [1, 2, 4, 8, 16, 32, 50, 50]
    assert set(gaps[8:]) == {50}
    run.errors["int4"] = good
    run.wanted.clear()
    decisions = run.run(50)
    assert [want for _, want in run.wanted].count("errors") == 1
    assert num_steps_before or decisions
    assert run.policy.state.retry == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_run_that_is_not_finite_for_long_pays_for_few_looks(bad):
    run = Simulated(link_s=1.0)
    run.run(200)
    while run.policy.wants(run.step) != "errors":
        run.run(1)
    run.errors["int4"], good = bad, run.errors["int4"]
    run.looking = 2 * MAX_LOOKING
    wanted = len(run.wanted)
    run.run(300)
    assert [want for _, want in run.wanted[wanted:]].count("errors") == 1
    run.errors["int4"], run.looking = good, 0.5 * MAX_LOOKING
    wanted = len(run.wanted)
    run.run(CHECK_EVERY + 1)
    assert [want for _, want in run.wanted[wanted:]].count("errors") == 1


def test_it_does_not_look_while_looking_has_cost_too_much():
    run = Simulated()
    run.looking = 2 * MAX_LOOKING
    run.run(500)
    assert [step for step, want in run.wanted if want == "errors"] == [FIRST]
    run.looking = 0.5 * MAX_LOOKING
    run.run(CHECK_EVERY + 1)
    assert "errors" in dict(run.wanted[-2:]).values()


# --- laws, for conditions drawn at random ---


def draw(source):
    """Return conditions in which the time of a step has one minimum over the rungs."""
    compute_s = 10 ** source.uniform(-2, 0)
    names = ["bf16", *COARSER]
    steps = sorted(source.uniform(0, 0.2) for _ in names)  # a coarser encoding adds more work
    work_s = {name: compute_s * sum(steps[: i + 1]) for i, name in enumerate(names)}
    link_s = compute_s * 10 ** source.uniform(-2, 1)
    return {
        "compute_s": compute_s,
        "link_s": link_s,
        "hidden_s": source.uniform(0, 0.5) * link_s,
        "work_s": work_s,
    }


def mean_step_s(run, num_steps):
    before = run.clock_s
    run.run(num_steps)
    return (run.clock_s - before) / num_steps


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_after_100_steps_it_is_within_a_tenth_of_the_best_and_does_not_flap(noise):
    for seed in range(60):
        source = random.Random(seed)
        run = Simulated("auto:budget=0.5,every=500", seed, noise=noise, **draw(source))
        run.run(100)
        assert mean_step_s(run, 300) <= run.best_s() * (1 + noise) / 0.9, (seed, run.policy.state.decisions)
        assert len(run.policy.state.decisions) <= 6
        assert len(run.run(1000)) <= (4 if noise else 0), seed


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_it_follows_changes_of_the_links_rate_that_show(noise):
    num_followed = 0
    for seed in range(60):
        source = random.Random(seed)
        run = Simulated("auto:budget=0.5,every=500", seed, noise=noise, **draw(source))
        run.run(300)
        for factor in (10 ** source.uniform(0, 1.5), 10 ** source.uniform(-1.5, 0)):
            before_s = run.times_with(run.policy.state.choice).step
            run.now.link_s *= factor
            run.now.hidden_s *= factor
            shows = not 0.8 < run.times_with(run.policy.state.choice).step / before_s < 1.25
            num_followed += shows
            run.run(100)
            reached = mean_step_s(run, 200) <= run.best_s() * (1 + noise) / 0.9
            assert reached or not shows, (seed, factor)
        kept = run.encodings
        assert len(run.run(1000)) <= (4 if noise else 0), (
            "perhaps one more trial, of what noise made promising"
        )
        assert run.encodings == kept or noise, seed
    assert num_followed > 20


@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_it_follows_a_change_of_the_links_rate_at_any_step_of_its_trials(factor):
    """Change the rate while other choices are tried: what was slower before need not be slower now."""
    for change_at in range(5, 150):
        work_s = {"int8": 0.002, "int4": 0.004, "int3": 0.006, "int2": 0.01}
        link_s = 0.03 if factor > 1 else 0.6
        run = Simulated("auto:budget=0.5,every=500", compute_s=0.1, link_s=link_s, work_s=work_s)
        run.run(change_at)
        run.now.link_s *= factor
        run.run(150)
        assert mean_step_s(run, 100) <= run.best_s() / 0.9, (change_at, run.policy.state.decisions)


def test_what_trials_lose_is_bounded_even_if_conditions_never_rest():
    most = 0.0
    for seed in range(20):
        source = random.Random(seed)
        run = Simulated("auto:budget=0.5,every=50", seed, noise=0.05, **draw(source))
        num_steps, worst = 0, 0.0
        while num_steps < 3000:
            run.now.link_s = run.now.compute_s * 10 ** source.uniform(-2, 1)
            length = source.randrange(20, 120)
            before = run.lost
            run.run(length)
            num_steps, worst = num_steps + length, max(worst, run.lost - before)
        assert run.lost <= MAX_CREDIT + REFILL * num_steps + worst, "see Note [Cost of trials]"
        most = max(most, run.lost)
    assert most > MAX_CREDIT, "the bound was put to the test"
