"""The parts of recipe `auto`, without ranks: units, samples, errors, times, the policy and its state."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.testing import run_virtual_ranks
from gradwire.tuning.choices import Choosing
from gradwire.tuning.errors import ErrorTable, measure_errors
from gradwire.tuning.policy import CHECK_EVERY, NUM_SETTLING, NUM_TIMED, Policy
from gradwire.tuning.policy_state import StepReport
from gradwire.tuning.sampling import PIECE, Sample, pieces_of
from gradwire.tuning.saved import read_state, write_state
from gradwire.tuning.times import UNKNOWN, Times, combine
from gradwire.tuning.units import units_of

TUNING = gradwire.recipe("auto:budget=0.1,every=100").tuning
FIRST = NUM_SETTLING + NUM_TIMED - 1
"""The step at whose end the first decision falls."""


def layout_of(sizes, index=0, dtype=torch.float32):
    slots = [Slot(f"{index}.p{i}", 0, torch.Size([size]), (1,)) for i, size in enumerate(sizes)]
    return BucketLayout.packed(index, dtype, slots)


# --- units and samples ---


def test_every_parameter_is_in_one_unit_and_units_are_neighbours():
    sizes = [7, 40_000, 300, 300, 0, 100_000, 20_000, 5, 900_000, 12]
    layout = layout_of(sizes)
    units = units_of([layout, layout_of([3, 4], 1)], tables=["0.p8"])
    names = [name for unit in units for name in unit.names]
    assert names == [s.name for s in layout.slots if s.numel] + ["1.p0", "1.p1"]
    assert [unit.names for unit in units][-3:] == [("0.p8",), ("0.p9",), ("1.p0", "1.p1")], (
        "tables stay apart"
    )
    for unit, after in itertools.pairwise(units):
        if unit.bucket == after.bucket:
            assert unit.begin + unit.numel == after.begin


def test_a_bucket_has_few_units():
    assert 8 < len(units_of([layout_of([20_000] * 100)])) <= 16


def test_complex_values_count_twice():
    (unit,) = units_of([layout_of([10, 20], dtype=torch.complex64)])
    assert (unit.begin, unit.numel) == (0, 60)


def test_few_values_are_all_looked_at():
    units = units_of([layout_of([30_000, 1_500])])
    pieces = pieces_of(units, step=3)
    assert (pieces[0].begin, pieces[-1].end) == (0, 31_500)
    assert all(a.end == b.begin for a, b in itertools.pairwise(pieces))
    assert all(piece.weight == 1 for piece in pieces)


def test_many_values_are_sampled_evenly_and_elsewhere_in_the_next_step():
    units = units_of([layout_of([8 << 20])])
    first, second = pieces_of(units, 0), pieces_of(units, 1)
    assert first != second
    for pieces in (first, second):
        begins = [piece.begin for piece in pieces]
        assert len(set(begins)) == len(begins) == (8 << 20) // PIECE // 128
        gaps = [b - a for a, b in itertools.pairwise(begins)]
        assert max(gaps) - min(gaps) <= PIECE
        assert all(piece.end - piece.begin == PIECE and piece.end <= 8 << 20 for piece in pieces)


def test_small_parameters_between_large_ones_are_all_looked_at():
    units = units_of([layout_of([1 << 20, 300, 1 << 20, 1_200])])
    assert len(units) == 2
    small = [piece for piece in pieces_of(units, 3) if piece.end - piece.begin < PIECE]
    assert [(piece.begin, piece.end) for piece in small] == [
        (1 << 20, (1 << 20) + 300),
        ((1 << 21) + 300 + PIECE, (1 << 21) + 1_500),
    ]


def test_a_sample_estimates_sums_of_whole_units():
    layout, other = layout_of([1 << 20, 3_000]), layout_of([700], 1)
    sample = Sample(units_of([layout, other]), step=5)
    torch.manual_seed(0)
    flat = torch.randn(layout.numel)
    sample.take(0, flat)
    assert not sample.is_whole
    sample.take(1, torch.full((700,), 2.0))
    assert sample.is_whole
    sums = sample.values.double().square().sum(1, keepdim=True)
    (large,), (small,) = sample.scale_up(sums)
    assert large == pytest.approx(flat.square().sum().item(), rel=0.05)
    assert small == 4 * 700
    flat.zero_()
    sample.take(0, flat)
    assert sample.used_units() == [False, True]
    flat[-1] = 1e-30
    sample.take(0, flat)
    assert sample.used_units() == [True, True]


# --- errors ---


def full_errors(exchange, layout, gradients):
    """Return the error of a real exchange of the bucket, squared, and the squared norm of its exact mean."""
    exact = torch.stack(gradients).double().mean(0)

    def job(group):
        flat = gradients[group.rank].clone()
        average(flat, exchange, Context(group, Scratch(), 1 / group.size, layout, Memory(), 7))
        return flat

    result = run_virtual_ranks(job, len(gradients))[0]
    return (result.double() - exact).square().sum().item(), exact.square().sum().item()


@pytest.mark.parametrize(("numel", "tolerance"), [(40_000, 0.03), (1 << 20, 0.1)])
@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_sampled_errors_are_those_of_the_exchange(numel, tolerance, alike, one_thread):
    layout = layout_of([numel])
    torch.manual_seed(1)
    # A part that all ranks share: then errors of ranks are alike too, and do not cancel out.
    common = alike * torch.randn(numel) * torch.rand(numel)
    gradients = [common + torch.randn(numel) for _ in range(3)]
    choosing = Choosing([layout], TUNING, 3)

    def job(group):
        sample = Sample(choosing.units, step=7)
        sample.take(0, gradients[group.rank])
        return measure_errors(sample.values, sample, choosing.codecs, group, 7)

    tables = run_virtual_ranks(job, 3)
    assert tables[0] == tables[1] == tables[2], "the same on every rank"
    for number, (name, exchange) in enumerate(TUNING.encodings):
        error, norm = full_errors(exchange, layout, gradients)
        assert tables[0].norms[0] == pytest.approx(norm, rel=tolerance)
        assert tables[0].errors[0][number] == pytest.approx(error, rel=tolerance), name
        assert error > 0


@pytest.mark.parametrize("budget", [0.01, 0.05, 0.15, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_choice_keeps_the_budget_and_could_not_send_much_less(budget, seed, one_thread):
    tuning = gradwire.recipe(f"auto:budget={budget}").tuning
    torch.manual_seed(seed)
    sizes = [70_000, 30_000, 90_000, 17_000, 200_000, 64]
    layout = layout_of(sizes)
    scales = torch.cat([torch.full((n,), 10.0 ** torch.randn(()).item()) for n in sizes])
    gradients = [scales * torch.randn(layout.numel) for _ in range(2)]
    choosing = Choosing([layout], tuning, 2)

    def job(group):
        sample = Sample(choosing.units, step=7)
        sample.take(0, gradients[group.rank])
        table = measure_errors(sample.values, sample, choosing.codecs, group, 7)
        return choosing.best(table, 4)

    first, second = run_virtual_ranks(job, 2)
    assert first == second
    error, norm = full_errors(tuning.exchange(first.encodings), layout, gradients)
    assert math.sqrt(error / norm) <= budget, "the margin covers the sampling error"
    assert first.error == pytest.approx(math.sqrt(error / norm), rel=0.1)
    finest = choosing.finest(None)
    assert first.num_bytes < finest.num_bytes
    if budget >= 0.05:
        assert first.num_bytes < 0.6 * finest.num_bytes


def test_tables_never_go_by_two_bits():
    layout = layout_of([50_000, 50_000])
    tuning = dataclasses.replace(gradwire.recipe("auto:budget=0.9").tuning, tables=("0.p1",))
    table = ErrorTable([1.0, 1.0], [[0.0, 1e-4, 0.01, 0.1]] * 2)
    assert Choosing([layout], tuning, 2).best(table, 4).encodings == {"0.p0": "int2", "0.p1": "int4"}


@pytest.mark.parametrize("ceiling", [30_000, 47_000, 90_000])
def test_a_ceiling_of_bytes_is_kept_whatever_the_error(ceiling):
    tuning = gradwire.recipe(f"auto:bytes={ceiling}").tuning
    layout = layout_of([40_000, 20_000, 33_333])
    table = ErrorTable([1.0] * 3, [[0.0, 1e-4, 0.01, 0.1]] * 3)
    choice = Choosing([layout], tuning, 2).best(table, 4)
    assert 0.6 * ceiling < choice.num_bytes <= ceiling


# --- times ---


def test_the_rank_that_comes_last_tells_how_long_communication_takes():
    slow, fast = Times(1.0, 0.2, 0.6), Times(1.0, 0.5, 0.9)
    assert combine([slow, fast, UNKNOWN]) == Times(1.0, 0.2, 0.6)
    assert combine([UNKNOWN]) == UNKNOWN


def test_the_exposed_part_of_a_step_follows_the_bytes():
    times = Times(1.0, 0.6, 0.8)
    assert times.predict(100, 25) == pytest.approx(0.55)
    assert times.predict(25, 100) == pytest.approx(2.8)


# --- the policy ---


class Simulated:
    """A policy with reports of a simulated run, step by step."""

    def __init__(self, spec="auto:budget=0.1,every=100"):
        self.tuning = gradwire.recipe(spec).tuning
        self.policy = Policy(self.tuning)
        self.choosing = Choosing([layout_of([80_000, 80_000])], self.tuning, 2)
        self.fine = self.choosing.finest(None).num_bytes
        self.errors = [0.0, 1e-4, 0.005, 0.1]
        self.compute_s, self.link_s = 0.1, 0.0
        self.work_s = {}
        self.used = (True, True)
        self.step = 0
        self.wanted = []

    @property
    def times(self):
        choice = self.policy.state.choice
        sent = self.fine if choice is None else choice.num_bytes
        coarsest = "bf16" if choice is None else max(choice.encodings.values(), key=self.tuning.names.index)
        exposed = self.link_s * sent / self.fine
        return Times(self.compute_s + exposed + self.work_s.get(coarsest, 0.0), exposed, exposed)

    def run(self, num_steps):
        """Run some steps; return the steps of new decisions."""
        before = len(self.policy.state.decisions)
        for _ in range(num_steps):
            want = self.policy.wants(self.step)
            if want != "nothing":
                self.wanted.append((self.step, want))
                table = ErrorTable([1.0] * len(self.used), [self.errors] * len(self.used))
                report = StepReport(self.times, self.used, table if want == "errors" else None)
                self.policy.conclude(self.step, report, self.choosing)
            self.step += 1
        return [decision.step for decision in self.policy.state.decisions[before:]]

    @property
    def last(self):
        return self.policy.state.decisions[-1]


def test_hidden_communication_stays_in_16_bits_and_says_so_once():
    run = Simulated()
    run.link_s = 0.002
    assert run.run(1000) == [FIRST]
    assert set(run.last.encodings.values()) == {"bf16"}
    assert "not worth coarser gradients" in run.last.reason
    looks = [step for step, want in run.wanted if want == "errors"]
    assert looks == [FIRST, 60, 160, 260, 360, 460, 560, 660, 760, 860, 960], "up to every 100 steps"


def test_communication_that_shows_is_compressed_and_kept_if_that_is_as_fast_as_predicted():
    run = Simulated()
    run.link_s = 0.9
    assert run.run(300) == [FIRST]
    assert set(run.last.encodings.values()) == {"int4"}
    assert run.last.error == pytest.approx(0.07, rel=0.02)
    assert run.last.got_ms == pytest.approx(run.last.expected_ms)
    assert run.last.step_ms == pytest.approx(1000)
    assert run.last.bytes_per_s == pytest.approx(run.fine / 0.9, rel=1e-5)


def test_an_encoding_that_takes_longer_than_it_saves_is_given_up():
    run = Simulated("auto:budget=0.5,every=100")
    run.link_s, run.work_s = 0.05, {"int2": 0.2, "int4": 0.004}
    run.run(300)
    reasons = [decision.reason for decision in run.policy.state.decisions]
    assert set(run.last.encodings.values()) == {"int4"}, reasons
    assert run.policy.state.phase == "keep"
    settled = len(reasons)
    run.run(1000)
    assert len(run.policy.state.decisions) == settled, "it does not flap"


def test_if_nothing_is_faster_it_goes_back_to_16_bits_for_good():
    run = Simulated("auto:budget=0.5,every=100")
    run.link_s, run.work_s = 0.05, {"int2": 0.2, "int4": 0.2, "int8": 0.2}
    run.run(100)
    assert set(run.last.encodings.values()) == {"bf16"}
    assert run.last.reason == "faster before"
    assert run.run(1000) == []


def test_a_trial_that_a_slow_minute_has_spoilt_is_repeated():
    run = Simulated()
    run.link_s = 0.3
    run.run(FIRST + 1)
    run.compute_s = 0.6  # from here on, everything is slower
    run.run(3 * (NUM_SETTLING + NUM_TIMED))
    assert set(run.last.encodings.values()) == {"bf16"}, "it seemed to be faster before"
    run.run(3 * CHECK_EVERY)
    assert set(run.last.encodings.values()) == {"int4"}
    assert run.policy.state.phase == "keep"


def test_it_follows_a_link_that_becomes_slow_and_fast_again():
    run = Simulated()
    run.run(200)
    assert set(run.last.encodings.values()) == {"bf16"}
    run.link_s = 1.0
    (changed,) = run.run(150)
    assert changed <= 200 + 3 * CHECK_EVERY
    assert set(run.last.encodings.values()) == {"int4"}
    run.link_s = 0.0001
    assert len(run.run(300)) == 1
    assert set(run.last.encodings.values()) == {"bf16"}, "finer gradients for nothing"


def test_one_slow_report_changes_nothing():
    run = Simulated()
    run.run(60 + CHECK_EVERY)
    run.compute_s = 0.5
    run.run(CHECK_EVERY)
    run.compute_s = 0.1
    looks = len([1 for _, want in run.wanted if want == "errors"])
    run.run(20)
    assert len([1 for _, want in run.wanted if want == "errors"]) == looks


def test_errors_that_leave_the_budget_lead_to_another_choice():
    run = Simulated()
    run.link_s = 1.0
    run.run(200)
    run.errors = [0.0, 1e-4, 0.02, 0.3]  # int4 has 0.14 now
    (_,) = run.run(110)
    assert set(run.last.encodings.values()) != {"int4"}
    assert run.last.error <= 0.1
    assert run.last.reason == "the error left the budget"


def test_a_little_more_error_changes_nothing():
    run = Simulated()
    run.link_s = 1.0
    run.run(200)
    run.errors = [0.0, 1e-4, 0.0055, 0.11]
    assert run.run(400) == []


def test_parameters_that_begin_to_have_gradients_are_noticed_soon():
    run = Simulated()
    run.used = (True, False)
    run.run(400)
    wanted = len(run.wanted)
    run.used = (True, True)
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
    run = Simulated()
    run.link_s = 1.0
    run.errors[2] = bad
    run.run(FIRST + 5)
    assert run.policy.state.decisions == []
    run.errors[2] = 0.005
    assert run.run(1) == [FIRST + 5], "it looks again at once"


def test_a_ceiling_of_bytes_needs_no_times():
    run = Simulated("auto:bytes=60000,every=100")
    assert run.run(300) == [FIRST]
    assert 40_000 < run.last.bytes_per_step <= 60_000


def test_a_budget_that_nothing_coarser_keeps_is_said():
    run = Simulated("auto:budget=0.001")
    run.link_s = 1.0
    run.run(50)
    assert run.last.reason == "nothing coarser keeps the budget"


# --- its state ---


def test_a_policy_goes_on_from_its_state():
    run, resumed = Simulated(), Simulated()
    run.link_s = resumed.link_s = 1.0
    run.run(230)
    text = write_state(run.policy.state)
    assert write_state(read_state(text)) == text
    resumed.policy = Policy(run.tuning, read_state(text))
    resumed.policy.resume(230)
    resumed.step = 230
    for each in (run, resumed):
        each.errors = [0.0, 1e-4, 0.02, 0.3]
    assert run.run(300) == resumed.run(300) != []
    assert run.last == resumed.last


def test_a_policy_that_resumes_within_a_trial_goes_on_with_it():
    runs = [Simulated("auto:budget=0.5"), Simulated("auto:budget=0.5")]
    for run in runs:
        run.link_s, run.work_s = 0.05, {"int2": 0.2, "int4": 0.1}
        run.run(FIRST + 15)
        assert run.policy.state.phase == "try"
    state = read_state(write_state(runs[0].policy.state))
    assert state == runs[0].policy.state
    runs[0].policy = Policy(run.tuning, state)
    runs[0].policy.resume(run.step)
    assert runs[0].run(100) == runs[1].run(100) != []
    assert runs[0].policy.state.decisions == runs[1].policy.state.decisions


def test_another_number_of_ranks_looks_again_soon():
    run = Simulated()
    run.link_s = 1.0
    run.run(FIRST + 3)
    run.policy.resume(run.step, look_soon=True)
    run.wanted.clear()
    run.run(20)
    assert run.wanted == [(FIRST + 3 + NUM_SETTLING + NUM_TIMED, "errors")]


def test_reports_without_the_times_that_are_needed_are_ignored():
    run = Simulated()
    report = StepReport(UNKNOWN, run.used, ErrorTable([1.0] * 2, [run.errors] * 2))
    assert run.policy.conclude(FIRST, report, run.choosing) is None
    assert run.policy.wants(FIRST + 1) == "errors"
    run.policy = Policy(run.tuning, needs_times=False)
    assert run.policy.conclude(FIRST, report, run.choosing).step_ms is None


DAMAGES = {
    "no JSON": lambda state: "{",
    "a list": lambda state: "[]",
    "a field less": lambda state: json.dumps({k: v for k, v in state.items() if k != "since"}),
    "a field more": lambda state: json.dumps({**state, "more": 1}),
    "a phase": lambda state: json.dumps({**state, "phase": "sleep"}),
    "a step": lambda state: json.dumps({**state, "since": -1}),
    "a step that is none": lambda state: json.dumps({**state, "next_look": True}),
    "an encoding": lambda state: json.dumps(
        {**state, "choice": {**state["choice"], "encodings": {"a": "int3"}}}
    ),
    "a time": lambda state: json.dumps(
        {**state, "settled": {"step": math.nan, "exposed": 0, "averaging": 0}}
    ),
    "a trial": lambda state: json.dumps({**state, "trial": {"tried": {}}}),
    "decisions": lambda state: json.dumps({**state, "decisions": [1]}),
    "a reason": lambda state: json.dumps({**state, "decisions": [{**state["decisions"][0], "reason": 3}]}),
    "used": lambda state: json.dumps({**state, "used": [1, 0]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_is_damaged_is_refused(damage):
    run = Simulated()
    run.link_s = 1.0
    run.run(50)
    text = DAMAGES[damage](json.loads(write_state(run.policy.state)))
    with pytest.raises(ValueError, match="its tuning cannot be read"):
        read_state(text)
