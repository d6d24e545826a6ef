"""Words for users of sharded models about what would otherwise go unnoticed."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire
from gradwire.codecs import Blocks
from gradwire.exchanges import TwoShot
from tests.logs import logged
from tests.sharded_runs import make, mesh_of, shard


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


def told_by(model, **options):
    """Return what `attach` logs."""
    with logged() as texts:
        gradwire.attach(model, "int8", **options).detach()
    return texts


def check_part_of_a_mesh(rank):
    mesh = mesh_of(2, 2)
    texts = told_by(shard(make(), mesh["shard"]))
    if rank:
        assert not texts, "told once, on the first rank"
    else:
        (text,) = texts
        assert "sharded over 2 of the 4 ranks of its device mesh (replicate=2, shard=2), and its grad" in text
        assert "replicas=mesh['replicate']" in text
    assert not told_by(shard(make(), mesh["shard"]), replicas=mesh["replicate"])
    assert not told_by(shard(make(), mesh))
    assert not told_by(shard(make(), mesh["replicate", "shard"]._flatten("all")))
    assert not told_by(shard(make(), mesh_of(1, 4)["shard"]))


def test_ranks_of_the_mesh_that_nothing_averages_over_are_told_of(four_ranks):
    four_ranks.run(check_part_of_a_mesh)


def tensor_parallel(mesh):
    """Return a model of which tensor parallelism splits all parameters but those of the norm."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["shard"])


def check_tensor_parallelism(rank):
    assert not told_by(tensor_parallel(mesh_of(2, 2, names=("shard", "tensor"))))
    texts = told_by(tensor_parallel(mesh_of(2, 1, 2, names=("replicate", "shard", "tensor"))))
    assert len(texts) == (rank == 0), texts
    assert all("over 2 of the 4 ranks" in text for text in texts)


def test_ranks_of_tensor_parallelism_are_not_taken_for_replicas(four_ranks):
    four_ranks.run(check_tensor_parallelism)
