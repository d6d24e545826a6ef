"""The parts of recipe `auto`, without ranks: units, samples, errors, times."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.recipes import scattered
from gradwire.testing import run_virtual_ranks
from gradwire.tuning.choices import Chooser, EncodingChoice
from gradwire.tuning.errors import ErrorTable, measure_errors
from gradwire.tuning.policy import NUM_SETTLING, NUM_TIMED
from gradwire.tuning.sampling import PIECE, Sample, pieces_of
from gradwire.tuning.times import UNKNOWN, Times, combine
from gradwire.tuning.tuner import Tuner
from gradwire.tuning.units import units_of

TUNING = gradwire.recipe("auto:budget=0.1,every=100").tuning


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


def test_small_parameters_between_large_ones_are_all_looked_at_in_blocks_that_they_share():
    large = 1 << 20
    units = units_of([layout_of([large, 300, large, 1_200])])
    assert [unit.begin for unit in units] == [0, large]
    pieces = [(piece.begin - large, piece.end - large) for piece in pieces_of(units, 3)]
    assert (0, PIECE) in pieces, "300 values, and those after them"
    assert pieces[-2:] == [(large, large + PIECE), (large + PIECE, large + 1_500)]


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


def full_errors(exchange, layout, gradients, units):
    """Return the error of a real exchange of each unit, squared, and the squared norm of its exact mean."""
    exact = torch.stack(gradients).double().mean(0)

    def job(group):
        flat = gradients[group.rank].clone()
        average(flat, exchange, Context(group, Scratch(), 1 / group.size, layout, Memory(), 7))
        return flat

    result = run_virtual_ranks(job, len(gradients))[0]
    parts = [slice(unit.begin, unit.begin + unit.numel) for unit in units]
    left_out = result.double() - exact
    return [[values[part].square().sum().item() for part in parts] for values in (left_out, exact)]


@pytest.mark.parametrize(("numel", "tolerance"), [(40_000, 0.03), (1 << 20, 0.1)])
@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_sampled_errors_are_those_of_the_exchange(numel, tolerance, alike):
    layout = layout_of([numel])
    torch.manual_seed(1)
    # A part that all ranks share: then errors of ranks are alike too, and do not cancel out.
    common = alike * torch.randn(numel) * torch.rand(numel)
    gradients = [common + torch.randn(numel) for _ in range(3)]
    chooser = Chooser([layout], TUNING, 3)

    def job(group):
        sample = Sample(chooser.units, step=7)
        sample.take(0, gradients[group.rank])
        return measure_errors(sample.values, sample, chooser.codecs, group, 7)

    tables = run_virtual_ranks(job, 3)
    assert tables[0] == tables[1] == tables[2], "the same on every rank"
    assert tables[0].errors[0][0] == 0, "fp32 leaves out nothing"
    for number, (name, exchange) in enumerate(TUNING.encodings[1:], start=1):
        (error,), (norm,) = full_errors(exchange, layout, gradients, chooser.units)
        assert tables[0].norms[0] == pytest.approx(norm, rel=tolerance)
        assert tables[0].errors[0][number] == pytest.approx(error, rel=tolerance), name
        assert error > 0


# Multiples of two blocks: a block with values of two parameters would have errors that no sample sees.
SIZES = [2048 * n for n in (34, 15, 44, 9, 98, 1)]
# Powers of ten; None for a gradient that is zero.
SCALES = st.lists(st.one_of(st.none(), st.floats(-6, 6)), min_size=len(SIZES), max_size=len(SIZES))


@settings(max_examples=25)
@given(st.floats(-2.3, -0.2), SCALES, st.sampled_from([0.0, 3.0]), st.integers(0, 99))
def test_a_choice_keeps_the_budget_in_both_senses_and_could_not_send_much_less(exponent, drawn, alike, seed):
    budget = 10**exponent
    tuning = gradwire.recipe(f"auto:budget={budget}").tuning
    torch.manual_seed(seed)
    layout = layout_of(SIZES)
    each = [0.0 if power is None else 10.0**power for power in drawn]
    scales = torch.tensor(each).repeat_interleave(torch.tensor(SIZES))
    common = alike * torch.randn(layout.numel)
    gradients = [scales * (common + torch.randn(layout.numel)) for _ in range(2)]
    chooser = Chooser([layout], tuning, 2)

    def job(group):
        sample = Sample(chooser.units, step=7)
        sample.take(0, gradients[group.rank])
        table = measure_errors(sample.values, sample, chooser.codecs, group, 7)
        return chooser.best(table, chooser.num_encodings)

    first, second = run_virtual_ranks(job, 2)
    assert first == second
    errors, norms = full_errors(tuning.exchange(first.encodings), layout, gradients, chooser.units)
    if not any(norms):
        assert first.error is None
        return
    counted = [(e / n, u.numel) for e, n, u in zip(errors, norms, chooser.units, strict=True) if n]
    of_values = sum(ratio * numel for ratio, numel in counted) / sum(numel for _, numel in counted)
    for error in (sum(errors) / sum(norms), of_values):
        assert math.sqrt(error) <= budget, "the margin covers the sampling error"
    table = ErrorTable(norms, [[error] for error in errors])
    bounded = sum(error for (error,) in table.relative([unit.numel for unit in chooser.units]))
    assert first.error == pytest.approx(math.sqrt(bounded), rel=0.1)
    assert max(sum(errors) / sum(norms), of_values) <= bounded * (1 + 1e-9)
    finest = chooser.reassess(None, None)
    if budget >= 0.05:
        assert first.num_bytes < 0.6 * finest.num_bytes


@st.composite
def odd_buckets(draw):
    """Draw sizes of parameters, with their scales: tiny ones beside large ones, of any size."""
    sizes = st.floats(0, 4.8).map(lambda power: int(10**power))
    scales = st.one_of(st.just(0.0), st.floats(-4, 4).map(lambda power: 10**power))
    return draw(st.lists(st.tuples(sizes, scales), min_size=1, max_size=7))


def error_of_choice(budget, drawn, num_ranks, seed):
    """Return what a budget bounds, of a real exchange of gradients with these sizes and scales."""
    tuning = gradwire.recipe(f"auto:budget={budget}").tuning
    torch.manual_seed(seed)
    sizes, each = zip(*drawn, strict=True)
    layout = layout_of(sizes)
    scales = torch.tensor(each).repeat_interleave(torch.tensor(sizes))
    gradients = [scales * torch.randn(layout.numel) for _ in range(num_ranks)]
    chooser = Chooser([layout], tuning, num_ranks)

    def job(group):
        sample = Sample(chooser.units, step=7)
        sample.take(0, gradients[group.rank])
        table = measure_errors(sample.values, sample, chooser.codecs, group, 7)
        return chooser.best(table, chooser.num_encodings).encodings, chooser.apart(table)

    first, *others = run_virtual_ranks(job, num_ranks)
    assert others == [first] * (num_ranks - 1)
    errors, norms = full_errors(tuning.exchange(*first), layout, gradients, chooser.units)
    relative = ErrorTable(norms, [[error] for error in errors]).relative([u.numel for u in chooser.units])
    return math.sqrt(sum(error for (error,) in relative))


@settings(max_examples=40)
@given(st.floats(-2.3, -0.2), odd_buckets(), st.sampled_from([2, 3]), st.integers(0, 99))
def test_a_block_with_values_of_several_parameters_does_not_break_the_budget(exponent, drawn, ranks, seed):
    budget = 10**exponent
    assert error_of_choice(budget, drawn, ranks, seed) <= 1.1 * budget


def test_units_of_other_sizes_share_no_block():
    # Values of the second would lose most of what they are in a block with values of the first.
    assert 0.2 < error_of_choice(0.3, [(22_500, 1.0), (22_500, 1e-3)], 2, 0) < 0.3


def test_small_gradients_count_by_their_number_of_values():
    layout = layout_of([50_000, 50_000])
    row = [0.0, 0.0, 1e-4, 0.01, 0.04, 0.15]
    table = ErrorTable([1.0, 1e-8], [row, [1e-8 * error for error in row]])
    tuning = gradwire.recipe("auto:budget=0.3").tuning
    # The second one's share of the error is next to nothing, and yet it is half of the values.
    assert set(Chooser([layout], tuning, 2).best(table, 6).encodings.values()) == {"int3"}


def test_a_gradient_of_zeros_does_not_count():
    table = ErrorTable([1.0, 0.0, 3.0], [[0.1], [0.0], [0.6]])
    assert table.relative([100, 10**6, 100]) == [[pytest.approx(0.05)], [0.0], [pytest.approx(0.15)]]
    cancelled = ErrorTable([1.0, 0.0], [[0.1], [0.2]])  # ranks' values whose mean is zero
    assert cancelled.relative([100, 10**6]) == [[pytest.approx(0.1)], [pytest.approx(0.2)]]
    assert ErrorTable([0.0], [[0.5]]).relative([100]) == [[0.0]]


def test_tables_never_go_by_two_bits():
    layout = layout_of([50_000, 50_000])
    tuning = dataclasses.replace(gradwire.recipe("auto:budget=0.9").tuning, tables=("0.p1",))
    table = ErrorTable([1.0, 1.0], [[0.0, 0.0, 1e-4, 0.01, 0.04, 0.1]] * 2)
    assert Chooser([layout], tuning, 2).best(table, 6).encodings == {"0.p0": "int2", "0.p1": "int4"}


@pytest.mark.parametrize("ceiling", [30_000, 47_000, 90_000])
def test_a_ceiling_of_bytes_is_kept_whatever_the_error(ceiling):
    tuning = gradwire.recipe(f"auto:bytes={ceiling}").tuning
    layout = layout_of([40_000, 20_000, 33_333])
    table = ErrorTable([1.0] * 3, [[0.0, 0.0, 1e-4, 0.01, 0.04, 0.1]] * 3)
    choice = Chooser([layout], tuning, 2).best(table, 6)
    assert 0.6 * ceiling < choice.num_bytes <= ceiling


# --- bytes ---


@st.composite
def small_models(draw):
    """Draw what a choice is made from: small buckets, or a bucket of shards, and errors of any order."""
    num_ranks = draw(st.sampled_from([2, 3, 4, 8]))
    tuning = gradwire.recipe(f"auto:budget={draw(st.floats(0.01, 0.9))}").tuning
    sizes = st.lists(st.floats(0, 4.5).map(lambda power: int(10**power)), min_size=1, max_size=4)
    if draw(st.booleans()):
        tuning = scattered(dataclasses.replace(gradwire.recipe("auto"), tuning=tuning)).tuning
        slots = [Slot(f"p{i}", 0, torch.Size([num_ranks * n]), (1,)) for i, n in enumerate(draw(sizes))]
        layouts = [BucketLayout.packed(0, torch.float32, slots, num_ranks)]
    else:
        layouts = [layout_of(own, i) for i, own in enumerate(draw(st.lists(sizes, min_size=1, max_size=3)))]
        names = [slot.name for layout in layouts for slot in layout.slots]
        tables = draw(st.lists(st.sampled_from(names), max_size=2))
        tuning = dataclasses.replace(tuning, tables=tuple(tables))
    chooser = Chooser(layouts, tuning, num_ranks)
    row = st.lists(st.floats(-5, 0).map(lambda power: 10**power), min_size=5, max_size=5)
    rows = [[0.0, *sorted(draw(row))] for _ in chooser.units]
    return chooser, tuning, ErrorTable([1.0] * len(rows), rows), draw(st.integers(1, 6))


@settings(max_examples=100)
@given(small_models())
def test_no_unit_has_an_encoding_with_more_error_and_no_fewer_bytes(drawn):
    chooser, tuning, table, num_allowed = drawn
    choice = chooser.best(table, num_allowed)
    for unit, errors in zip(chooser.units, table.errors, strict=True):
        now = tuning.names.index(choice.encodings[unit.names[0]])
        for finer in range(now):
            encodings = {**choice.encodings, **dict.fromkeys(unit.names, tuning.names[finer])}
            other = chooser.reassess(EncodingChoice(encodings, 0, None), table)
            assert other.num_bytes > choice.num_bytes or errors[finer] >= errors[now], (unit, finer)


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_a_tiny_model_does_not_go_by_encodings_with_large_blocks(num_ranks):
    """A rank's part of 100 values is less than a block of 128."""
    tuning = gradwire.recipe("auto:budget=0.9").tuning
    table = ErrorTable([1.0], [[0.0, 0.0, 1e-4, 0.01, 0.04, 0.15]])
    chooser = Chooser([layout_of([100])], tuning, num_ranks)
    bytes_of = dict(zip(tuning.names, chooser.bytes_by_unit[0], strict=True))
    assert bytes_of["int4"] < bytes_of["int2"] < bytes_of["int3"]
    choice = chooser.best(table, 6)
    assert choice.encodings == {"0.p0": "int4"}
    assert choice.num_bytes == bytes_of["int4"]


def test_values_that_are_16_bits_wide_already_gain_nothing_by_bf16():
    tuning = gradwire.recipe("auto").tuning
    chooser = Chooser([layout_of([50_000], dtype=torch.bfloat16)], tuning, 2)
    fp32, bf16, int8, *_ = chooser.bytes_by_unit[0]
    assert fp32 == bf16 > int8
    table = ErrorTable([1.0], [[0.0, 1e-6, 1.0, 1.0, 1.0, 1.0]])
    assert chooser.best(table, 6).encodings == {"0.p0": "fp32"}


# --- times ---


def test_the_rank_that_comes_last_tells_how_long_communication_takes():
    slow, fast = Times(1.0, 0.2, 0.6), Times(1.0, 0.5, 0.9)
    assert combine([slow, fast, UNKNOWN]) == Times(1.0, 0.2, 0.6)
    assert combine([UNKNOWN]) == UNKNOWN


def test_the_exposed_part_of_a_step_follows_the_bytes():
    times = Times(1.0, 0.6, 0.8)
    assert times.predict(100, 25) == pytest.approx(0.55)
    assert times.predict(25, 100) == pytest.approx(2.8)


def test_buckets_without_values_are_not_measured():
    full, empty, cpu = layout_of([5000]), layout_of([0], 1), torch.device("cpu")
    for layouts, is_due in (([full, empty], True), ([layout_of([0])], False)):
        tuner = Tuner(TUNING, 0, 1, is_timed=False)
        for step in range(20):
            for layout in layouts:
                tuner.arrive(layout, torch.ones(layout.numel), step, is_last=layout is layouts[-1])
            tuner.end_step(step, cpu)
        assert tuner.is_due is is_due


def test_a_step_is_sampled_only_if_its_buckets_are_those_of_the_last_whole_step():
    tuner, cpu = Tuner(TUNING, 0, 1, is_timed=False), torch.device("cpu")
    few, many = [layout_of([500]), layout_of([300], 1)], [layout_of([500]), layout_of([7000], 1)]

    def run(layouts, step, num_arrived=2):
        for layout in layouts[:num_arrived]:
            tuner.arrive(layout, torch.ones(layout.numel), step, is_last=layout is layouts[-1])
        if num_arrived == 2:
            tuner.end_step(step, cpu)
        return tuner.is_due

    assert not any(run(few, step) for step in range(NUM_SETTLING + NUM_TIMED - 1))
    assert run(few, 11)
    assert not run(many, 12), "other buckets"
    assert run(many, 13)
    others = [layout_of([900]), layout_of([7000], 1)]
    run(others, 14, num_arrived=1)  # an exception of the user's ends the pass
    assert not run(others, 14), "the last whole step had others"
    assert run(others, 15)


def test_the_time_of_measuring_is_counted():
    tuner, layout = Tuner(TUNING, 0, 2), layout_of([10])
    tuner.arrive(layout, torch.ones(10), 0, is_last=True)
    assert tuner.looking == 0
    with tuner.count():
        torch.randn(1000).sort()
    assert 0 < tuner.looking < 1
