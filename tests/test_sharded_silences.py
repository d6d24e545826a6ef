"""Words for users of sharded models about what would otherwise go unnoticed."""

import pytest
import torch

import gradwire
from gradwire.codecs import Blocks
from gradwire.exchanges import TwoShot
from tests.sharded_runs import make, shard


def check_residuals(rank):
    model = shard(make())
    for spec, names in (
        ("int4:feedback=true", ["int4"]),  # the same recipe as int4
        ("int4:feedback=false", []),
        ("route(ndim<2=fp32; *=schedule(0=int8; 9=int4:block=64))", ["int4:block=64"]),
    ):
        with gradwire.attach(model, spec) as wire:
            _, *lines = wire.plan().note.splitlines()
        told = "No residuals: a reduce-scatter keeps none, so {} goes without its error feedback."
        assert lines == [told.format(name) for name in names]


def test_the_plan_of_a_reduce_scatter_says_which_recipes_go_without_feedback(two_ranks):
    two_ranks.run(check_residuals)


def check_residuals_of_an_exchange(rank):
    own = gradwire.Recipe("mine", TwoShot(Blocks("int4", 128), torch.float32))
    with pytest.raises(ValueError, match="recipe mine keeps residuals, and a reduce-scatter keeps none"):
        gradwire.attach(shard(make()), own)


def test_a_recipe_made_of_an_exchange_with_residuals_is_refused(two_ranks):
    two_ranks.run(check_residuals_of_an_exchange)
