"""`check_sharded`: recipes hold in every way of sharding, and errors are found."""

from dataclasses import replace

import pytest

import gradwire
from gradwire.exchanges import Scattered
from gradwire.testing import check_sharded
from gradwire.testing import sharded as checked

FSDP = ["fp32", "bf16", "fp16", "int8", "fp8", "int4", "int3", "int2", "sign"]
HSDP = ["fp32", "bf16", "int8", "fp8", "int4"]


@pytest.mark.full
@pytest.mark.parametrize("recipe", FSDP)
def test_shards_are_reduced_in_every_way(recipe):
    report = check_sharded(recipe, world_size=2)
    assert report.ok, report
    assert len(report.results) == 5


@pytest.mark.full
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_reduce_shards(world_size):
    for recipe in ("int8", "int4"):
        report = check_sharded(recipe, world_size=world_size)
        assert report.ok, report


@pytest.mark.full
@pytest.mark.parametrize("recipe", HSDP)
def test_replicas_are_averaged_in_every_way(recipe):
    report = check_sharded(recipe, world_size=4, replicas=2)
    assert report.ok, report
    assert len(report.results) == 6


@pytest.mark.full
def test_low_rank_averages_replicas():
    report = check_sharded("powersgd:rank=4", world_size=4, replicas=2, tolerance=1.0)
    assert report.ok, report


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ValueError, match="whole matrices"):
        check_sharded("powersgd", tolerance=1.0)
    with pytest.raises(ValueError, match="3 ranks cannot be 2 replicas"):
        check_sharded("int8", world_size=3, replicas=2)
    with pytest.raises(ValueError, match="give one"):
        check_sharded("acp", world_size=4, replicas=2)


def check_too_strict(rank):
    """Rounding to 4 bits is more than the bound of 8 allows."""
    bounds = replace(checked.bounds_of(gradwire.recipe("int8"), None, 2, 1), tolerance=1e-3)
    with pytest.raises(AssertionError, match="step 0"):
        checked._check(rank, checked.ShardedCase(), gradwire.recipe("int4"), bounds, 1, "cpu")


def test_an_error_beyond_the_bound_is_found(two_ranks):
    two_ranks.run(check_too_strict)


def reduce_to_zeros(self, flat, context):
    yield from ()
    flat.zero_()


def check_zeros(rank, spec):
    """Few bits have errors as large as the gradients, so zeros are within the tolerance."""
    recipe = gradwire.recipe(spec)
    bounds = checked.bounds_of(recipe, None, world_size=2, replicas=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scattered, "rounds", reduce_to_zeros)
        with pytest.raises(AssertionError, match="step 0: gradients are of the wrong size"):
            checked._check(rank, checked.ShardedCase(), recipe, bounds, 1, "cpu")


@pytest.mark.parametrize("spec", ["sign", "sign:rotated=false", "int2"])
def test_zeros_are_found_whatever_the_tolerance(spec, two_ranks):
    two_ranks.run(check_zeros, spec)
