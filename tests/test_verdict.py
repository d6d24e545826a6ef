"""The verdict on a record: the bottleneck, its size, what to use, and when nothing can be gained."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.headroom import give_verdict, recommend, record_notes
from tests.records import record
from tests.report_records import tuned


def noisy(fast, slow, num_fast, num_samples=24):
    """Return samples of which the first few are fast."""
    return tuple(fast if i < num_fast else slow for i in range(num_samples))


def with_samples(old, **samples):
    rows = [dataclasses.replace(row, samples_ms=samples.get(row.recipe, row.samples_ms)) for row in old.rows]
    return dataclasses.replace(old, rows=tuple(rows))


def test_a_bottleneck_is_named_with_its_size_and_the_best_recipe():
    said = give_verdict(record(allreduce=100, fp32=98, bf16=80, noop=50))
    assert "50% of a plain DDP step on 2 ranks" in said
    assert "2.00x as fast, which is the most" in said
    assert "bf16, the best measured, makes it 1.25x as fast: use it: gradwire.attach(model, 'bf16')." in said


def test_without_recipes_the_verdict_is_about_communication_alone():
    assert give_verdict(record(allreduce=100, noop=50)).endswith("the most any recipe could gain.")


def test_nothing_is_to_be_gained_where_communication_is_cheap():
    said = give_verdict(record(allreduce=100, bf16=99, noop=97))
    assert "3% of a plain DDP step" in said
    assert "more than 1.03x" in said
    assert "nothing to gain" in said


def test_communication_that_seems_to_save_time_costs_nothing():
    said = give_verdict(record(allreduce=100, bf16=99, noop=103))
    assert "takes 0% of a plain DDP step" in said
    assert "more than 1.00x" in said


@pytest.mark.parametrize("noop", [101, 100, 97, 60])
def test_a_recipe_that_seems_faster_than_no_communication_makes_the_measurement_too_noisy(noop):
    found = record(allreduce=100, int8=98, bf16=50, noop=noop)
    said = give_verdict(found)
    most = 100 / noop
    assert said.startswith(
        "This measurement is too noisy to judge: bf16 seems to make a step 2.00x as fast, but a step without "
        f"any communication only {most:.2f}x"
    )
    assert said.endswith("Measure again on an idle machine, with more --steps.")
    assert recommend(found) is None


def test_errors_are_explained_if_there_are_any():
    found = record(allreduce=100, int8=50, noop=40)
    (note,) = [note for note in record_notes(found) if note.startswith("Error: ")]
    assert note == "Error: of the first step's averaged gradient, not measured here."
    found = dataclasses.replace(
        found, rows=(dataclasses.replace(found.rows[0], gradient_error=0.01), *found.rows[1:])
    )
    (note,) = [note for note in record_notes(found) if note.startswith("Error: ")]
    assert note == "Error: of the first step's averaged gradient, relative to plain DDP's."


@given(times=st.lists(st.floats(50, 200), min_size=3, max_size=5))
def test_a_verdict_never_denies_a_gain_that_its_table_shows(times):
    found = record(**dict(zip(("allreduce", "noop", "bf16", "int8", "int4"), times, strict=False)))
    best = max(found.gain(row) for row in found.recipes)
    said = give_verdict(found)
    limit = re.search(r"more than (.*)x as fast", said) or re.search(r"would be (.*)x as fast, which", said)
    if limit:
        assert best <= 1.06 * float(limit[1]), said


def test_a_small_gain_is_called_small():
    said = give_verdict(record(allreduce=100, bf16=97, noop=50))
    assert "bf16, the best measured, gains 3.1%, so compression is not worth it here." in said


def test_recipes_that_slow_a_step_down_gain_nothing():
    said = give_verdict(record(allreduce=100, fp32=125, bf16=105, noop=50))
    assert "bf16, the best measured, makes it 0.95x as fast, so compression is not worth it" in said


def test_a_gain_that_chance_could_give_is_called_noise():
    steady = record(allreduce=100, bf16=80, noop=50)
    said = give_verdict(with_samples(steady, bf16=noisy(80, 120, num_fast=14)))
    assert "1.25x as fast, but that may be noise: it was faster in 14 of 24 pairs taken side by side" in said
    said = give_verdict(with_samples(steady, bf16=noisy(80, 120, num_fast=22)))
    assert "1.25x as fast: use it" in said


def test_a_bottleneck_that_chance_could_give_is_called_noise():
    steady = record(allreduce=100, bf16=80, noop=50)
    said = give_verdict(with_samples(steady, noop=noisy(50, 160, num_fast=14)))
    assert "50% of a plain DDP step" in said
    assert "may be noise: without it a step was faster in 14 of 24 pairs taken side by side" in said


def test_of_eight_steps_one_may_be_slower_by_a_little_but_not_by_much():
    steady = record(num_samples=8, allreduce=100, bf16=80, noop=50)
    said = give_verdict(with_samples(steady, bf16=(80,) * 7 + (101,)))
    assert "1.25x as fast: use it" in said
    said = give_verdict(with_samples(steady, bf16=(80,) * 7 + (300,)))
    assert "may be noise: it was faster in 7 of 8 pairs taken side by side" in said


def test_a_few_steps_show_nothing():
    assert "may be noise" in give_verdict(record(num_samples=3, allreduce=100, bf16=80, noop=50))


def small(name, ms):
    """Return a row with buckets of 8 MB."""
    (row,) = [row for row in record(**{"allreduce": 1, "noop": 1, name: ms}).rows if row.recipe == name]
    return dataclasses.replace(row, bucket_mb=8.0)


def test_smaller_buckets_are_recommended_where_they_are_best():
    plain = record(allreduce=100, bf16=90, noop=50)
    said = give_verdict(dataclasses.replace(plain, rows=(*plain.rows, small("bf16", 60))))
    assert "bf16 with buckets of 8 MB, the best measured, makes it 1.67x as fast: use it" in said
    assert "bucket_cap_mb=8" in said
    said = give_verdict(dataclasses.replace(plain, rows=(*plain.rows, small("allreduce", 80))))
    assert "plain DDP with buckets of 8 MB, the best measured, makes it 1.25x as fast: use that" in said
    said = give_verdict(
        dataclasses.replace(plain, rows=(*plain.rows, small("allreduce", 80), small("bf16", 60)))
    )
    assert said.endswith("Plain DDP with buckets of 8 MB alone makes it 1.25x as fast.")


def test_default_buckets_are_recommended_where_they_are_best():
    rows = [
        dataclasses.replace(small(name, ms), bucket_mb=None) for name, ms in (("bf16", 60), ("allreduce", 80))
    ]
    baselines = (small("allreduce", 100), small("noop", 50))
    plain = dataclasses.replace(record(allreduce=100, noop=50), bucket_mb=8.0, rows=(*baselines, *rows))
    said = give_verdict(plain)
    assert "bf16 with default buckets, the best measured, makes it 1.67x as fast: use it" in said
    assert "with DistributedDataParallel(..., bucket_cap_mb=None)." in said
    assert said.endswith("Plain DDP with default buckets alone makes it 1.25x as fast.")


def test_the_link_is_part_of_the_verdict():
    slow = dataclasses.replace(record(allreduce=100, bf16=80, noop=50), link="100mbit")
    assert "on 2 ranks with links of 100mbit" in give_verdict(slow)


def test_many_steps_are_no_trouble():
    assert "1.25x as fast: use it" in give_verdict(record(num_samples=2000, allreduce=100, bf16=80, noop=50))


def test_one_rank_has_nothing_to_gain():
    assert "nothing to gain" in give_verdict(record(world_size=1, allreduce=100, bf16=80, noop=50))


def with_error(old, **errors):
    rows = [dataclasses.replace(row, gradient_error=errors.get(row.recipe)) for row in old.rows]
    return dataclasses.replace(old, rows=tuple(rows))


def test_a_coarse_recipe_is_named_but_not_recommended():
    found = with_error(record(allreduce=100, int4=50, acp=20, noop=10), int4=0.1, acp=0.95)
    assert recommend(found).recipe == "int4"
    said = give_verdict(found)
    used = "makes it 2.00x as fast: use it: gradwire.attach(model, 'int4')."
    assert f"int4, the fastest that is not coarse, {used}" in said
    assert "acp is faster still, 5.00x, but coarse (its gradient is 95% off)" in said
    only = with_error(record(allreduce=100, acp=20, noop=10), acp=0.95)
    assert recommend(only) is None
    assert "acp makes it 5.00x as fast, but coarse" in give_verdict(only)


def test_auto_is_recommended_at_the_error_that_its_budget_allows():
    found = tuned()
    assert recommend(found).recipe == "auto"
    assert "coarse" not in give_verdict(found)
    rows = [dataclasses.replace(row, decisions=()) for row in found.rows]
    assert recommend(dataclasses.replace(found, rows=tuple(rows))) is None


def test_a_recipe_that_sends_next_to_nothing_is_coarse_whatever_its_error():
    plain = record(allreduce=100, int4=50, acp=20, noop=10)
    sent = {"int4": 130_000, "acp": 10_000}
    rows = [dataclasses.replace(r, bytes_per_step=sent.get(r.recipe, r.bytes_per_step)) for r in plain.rows]
    unknown = dataclasses.replace(plain, rows=tuple(rows))
    assert recommend(unknown).recipe == "int4"
    assert recommend(with_error(unknown, int4=0.1, acp=0.1)).recipe == "int4"
    said = "acp is faster still, 5.00x, but coarse: check first that your model learns with it."
    assert said in give_verdict(unknown)


def test_a_coarse_recipe_whose_gain_may_be_noise_is_named_as_such():
    steady = with_error(record(allreduce=100, int8=90, sign=70, noop=50), int8=0.01, sign=0.6)
    lucky = noisy(70, 150, num_fast=14)
    said = give_verdict(with_samples(steady, sign=lucky))
    assert "int8, the fastest that is not coarse, makes it 1.11x as fast: use it" in said
    assert said.endswith(
        "sign is faster still, 1.43x, but coarse (its gradient is 60% off), and that may be noise: it was "
        "faster in 14 of 24 pairs taken side by side, which is not enough to be sure."
    )
    both = give_verdict(with_samples(steady, int8=noisy(90, 120, num_fast=14), sign=lucky))
    assert "int8, the fastest that is not coarse, makes it 1.11x as fast, but that may be noise" in both
    assert "sign is faster still, 1.43x, but coarse" in both


def test_a_coarse_recipe_that_may_be_no_faster_than_the_best_is_named_as_such():
    steady = with_error(record(allreduce=200, int8=90, sign=70, noop=50), int8=0.01, sign=0.6)
    said = give_verdict(with_samples(steady, sign=noisy(70, 120, num_fast=14)))
    assert said.endswith(
        "sign is faster still, 2.86x, but coarse (its gradient is 60% off), and what it has over int8 may be "
        "noise: check first that your model learns with it."
    )


def test_a_coarse_recipe_that_is_hardly_faster_only_keeps_another_from_being_called_the_best():
    said = give_verdict(with_error(record(allreduce=100, int8=80, sign=78, noop=50), int8=0.01, sign=0.6))
    assert "int8, the fastest that is not coarse, makes it 1.25x as fast: use it" in said
    assert "sign" not in said


def test_the_coarse_recipe_that_is_least_off_is_named_beside_the_fastest():
    errors = {"int4": 0.1, "int2": 0.36, "sign": 0.75, "powersgd": 0.9}
    found = with_error(record(allreduce=200, int4=90, int2=60, sign=50, powersgd=40, noop=30), **errors)
    assert give_verdict(found).endswith(
        "powersgd is faster still, 5.00x, but coarse (its gradient is 90% off): check first that your model "
        "learns with it. int2 is between, 3.33x, and its gradient 36% off."
    )
    as_fast = with_error(record(allreduce=200, int4=90, int2=40.5, sign=40, noop=30), int2=0.36, sign=0.75)
    assert "between" not in give_verdict(as_fast), "as fast as the fastest"
    further_off = with_error(record(allreduce=200, int4=90, powersgd=60, sign=50, noop=30), **errors)
    assert "between" not in give_verdict(further_off)
    lucky = with_samples(found, int2=noisy(60, 150, num_fast=14))
    assert "but coarse" in give_verdict(lucky)
    assert "between" not in give_verdict(lucky), "int2 may be no faster than int4"


def test_a_small_gain_that_chance_could_give_is_called_noise_too():
    steady = record(allreduce=100, bf16=97, noop=50)
    said = give_verdict(with_samples(steady, bf16=noisy(97, 120, num_fast=14)))
    assert "bf16, the best measured, gains 3.0%, which may be noise, so compression is not worth it" in said


def test_compression_is_not_called_worthless_where_a_coarse_recipe_gains():
    said = give_verdict(with_error(record(allreduce=100, int8=97, sign=60, noop=50), int8=0.01, sign=0.6))
    assert "int8, the fastest that is not coarse, gains 3.1%, so it is not worth it here. sign is" in said


def test_of_recipes_that_are_equally_fast_the_one_that_changes_least_is_recommended():
    found = with_error(record(allreduce=100, int4=50, int8=51, noop=10), int4=0.1, int8=0.01)
    assert recommend(found).recipe == "int8"


def test_nothing_is_recommended_where_nothing_is_gained():
    assert recommend(record(allreduce=100, bf16=97, noop=50)) is None
    assert recommend(record(world_size=1, allreduce=100, bf16=50, noop=20)) is None
    nothing = record(allreduce=100, bf16=94.5, noop=98)
    assert "nothing to gain" in give_verdict(nothing)
    assert recommend(nothing) is None
    assert recommend(record(num_samples=3, allreduce=100, bf16=50, noop=20)) is None
