"""`check_sharded`: recipes hold in every way of sharding, and errors are found."""

import pytest

from gradwire.testing import check_sharded
from gradwire.testing import sharded as checked

FSDP = ["fp32", "bf16", "fp16", "int8", "fp8", "int4", "sign"]
HSDP = ["fp32", "bf16", "int8", "fp8", "int4"]


@pytest.mark.full
@pytest.mark.parametrize("recipe", FSDP)
def test_shards_are_reduced_in_every_way(recipe):
    report = check_sharded(recipe, world_size=2, tolerance=2.0 if recipe == "sign" else None)
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
    bounds = checked.Bounds(1e-3, 0.01, False, 1, None, False)
    with pytest.raises(AssertionError, match="step 0"):
        checked._check(rank, checked.ShardedCase(), checked.parse_recipe("int4"), bounds, 1, "cpu")


def test_an_error_beyond_the_bound_is_found(two_ranks):
    two_ranks.run(check_too_strict)
