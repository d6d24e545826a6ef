"""Bytes and errors of units are traded against each other as well as can be."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.tuning.allocation import allocate

NUM_CHOICES = 3


def units():
    """Units of falling bytes and any errors, of up to three encodings."""
    size = st.integers(1, 50)
    error = st.integers(0, 1000).map(lambda n: n / 100)
    points = st.lists(st.tuples(size, error), min_size=1, max_size=NUM_CHOICES, unique_by=lambda p: p[0])
    return st.lists(points.map(lambda unit: sorted(unit, reverse=True)), min_size=1, max_size=5)


def totals(tables, chosen):
    return [math.fsum(row[n] for row, n in zip(table, chosen, strict=True)) for table in tables]


def split(drawn):
    return [[size for size, _ in unit] for unit in drawn], [[error for _, error in unit] for unit in drawn]


def everything(num_bytes, errors):
    return [
        totals((num_bytes, errors), chosen)
        for chosen in itertools.product(*(range(len(row)) for row in num_bytes))
    ]


@settings(max_examples=200)
@given(units(), st.floats(0, 30))
def test_bytes_are_least_within_the_error_but_for_one_step_of_one_unit(drawn, limit):
    num_bytes, errors = split(drawn)
    chosen = allocate(num_bytes, errors, max_error=limit)
    sent, error = totals((num_bytes, errors), chosen)
    finest = totals((num_bytes, errors), [0] * len(chosen))
    if finest[1] > limit:
        assert error <= finest[1] + 1e-9
        return
    assert error <= limit + 1e-9
    least = min(b for b, e in everything(num_bytes, errors) if e <= limit + 1e-9)
    assert sent <= least + max(row[0] - row[-1] for row in num_bytes)


@settings(max_examples=200)
@given(units(), st.floats(1e-3, 10))
def test_each_stage_is_the_best_for_its_own_totals(drawn, price):
    # At a price of a byte, the best choice has the least error + price * bytes. Its own error, taken as the
    # limit, must lead back to a choice that costs no more.
    num_bytes, errors = split(drawn)
    best = min(e + price * b for b, e in everything(num_bytes, errors))
    stage = min((e, b) for b, e in everything(num_bytes, errors) if e + price * b <= best + 1e-9)
    if stage[0] < totals((errors,), [0] * len(drawn))[0]:
        return  # coarser and better at once: then the limit is below where the allocation begins
    sent, error = totals((num_bytes, errors), allocate(num_bytes, errors, max_error=stage[0] + 1e-9))
    assert error + price * sent <= best + 1e-6


@settings(max_examples=200)
@given(units(), st.integers(1, 200))
def test_bytes_stay_below_a_ceiling_if_any_choice_does(drawn, ceiling):
    num_bytes, errors = split(drawn)
    chosen = allocate(num_bytes, errors, max_bytes=ceiling)
    sent, error = totals((num_bytes, errors), chosen)
    possible = [e for b, e in everything(num_bytes, errors) if b <= ceiling]
    if not possible:
        assert sent == sum(row[-1] for row in num_bytes), "as few as there are"
        return
    assert sent <= ceiling
    rises = [max(row) - min(row) for row in errors]
    assert error <= min(possible) + max(rises) + 1e-9, "at most one step of one unit above the least"


def test_a_step_that_does_not_fit_leaves_room_for_smaller_ones():
    assert allocate([[100, 10], [16, 8]], [[0, 5], [0, 2]], max_error=3) == [0, 1]


def test_an_encoding_above_the_hull_is_not_chosen():
    # 8 saves little and costs much; on the way from 16 to 4 it is never best.
    for limit in (0, 3, 5, 6, 100):
        assert allocate([[16, 8, 4]], [[0, 5, 6]], max_error=limit)[0] != 1


def test_many_units_take_little_time():
    num_bytes = [[16 * n, 8 * n, 4 * n] for n in range(1, 3001)]
    errors = [[0, n % 7 + 1, 9 * (n % 7 + 1)] for n in range(1, 3001)]
    chosen = allocate(num_bytes, errors, max_error=20_000)
    assert totals((errors,), chosen)[0] == pytest.approx(20_000, rel=0.01)
