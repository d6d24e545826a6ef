"""Recipes: names, options, errors."""

import pickle

import pytest
import torch

import gradwire
from tests.rows import ROWS


def test_every_recipe_has_a_row():
    assert {row.spec.partition(":")[0] for row in ROWS} == set(gradwire.RECIPES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.spec)
def test_a_recipe_is_a_value(row):
    recipe = gradwire.recipe(row.spec)
    assert recipe == gradwire.recipe(row.spec)
    assert hash(recipe) == hash(gradwire.recipe(row.spec))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert str(recipe) == row.spec
    assert gradwire.recipe(str(recipe)) == recipe
    assert gradwire.recipe(recipe) is recipe


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp61", "there is no recipe 'fp61'; did you mean 'fp16'"),
        ("BF16", "did you mean 'bf16'"),
        ("zzzzzz", r"there is no recipe 'zzzzzz'\. Recipes: noop, fp32, fp16, bf16"),
        ("", "there is no recipe ''"),
        ("fp16:reduction=max", "option 'reduction' must be mean or sum, not 'max'"),
        ("fp16:block=3", "recipe 'fp16' has no option 'block'; it has reduction"),
        ("noop:x=1", "recipe 'noop' has no option 'x'; it has none"),
        ("fp16:reduction", "'reduction' is not of the form option=value"),
        ("fp16:reduction=sum,reduction=mean", "option 'reduction' is given twice"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(spec, message):
    with pytest.raises(ValueError, match=message):
        gradwire.recipe(spec)


def test_what_is_no_recipe_is_refused():
    with pytest.raises(TypeError, match="not int"):
        gradwire.recipe(3)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', not 'max'"):
        gradwire.fp32(reduction="max")


@pytest.mark.parametrize("row", [r for r in ROWS if "local_size" not in r.spec], ids=lambda row: row.spec)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("numel", [0, 1, 63, 1000, 25_000_003])
def test_no_rank_sends_much_more_than_twice_its_share(row, world_size, numel):
    recipe = gradwire.recipe(row.spec)
    most = max(recipe.wire_bytes(numel, rank=rank, world_size=world_size) for rank in range(world_size))
    whole = row.exact_bytes(numel, torch.float32)
    # A chunk is rounded up to 64 values, and each row may have a header.
    slack = 2 * world_size * row.exact_bytes(64, torch.float32)
    assert most <= 2 * (world_size - 1) / world_size * whole + slack
    assert (most == 0) == (world_size == 1 or whole == 0)
