"""Virtual ranks of a grid of replicas and shards, bit for bit with real ones."""

import pytest
import torch

import gradwire
from gradwire.testing import VirtualHSDP
from tests.sharded_runs import attached, batch, loss_of, make, mesh_of, shard

SPECS = ["powersgd:rank=2", "int4", "int8:rounding=stochastic", "sign"]
FIRST = SPECS[:1]


def train_virtual(ranks, model, steps):
    """Train by gradient descent; return the weights after each step."""
    weights = []
    for step in steps:
        for rank in range(ranks.world_size):
            with ranks.backward_of(rank):
                loss_of(model, batch(rank, step)).backward()
        ranks.average()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return weights


def check_bits(rank, spec):
    """Train as real and as virtual ranks; go on virtually from the state of real ones, and the reverse."""
    model, wire = attached(spec, False)
    virtual = make()
    ranks = VirtualHSDP(virtual, spec, replicas=2, shards=2)
    for step in range(4):
        if step == 2:
            ranks.load_state_dict(wire.state_dict(gather=True))
            wire.load_state_dict(ranks.state_dict())
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        (want,) = train_virtual(ranks, virtual, [step])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), want[name]), (step, name)
    claims = 24 * 3 * 4
    assert wire.stats().bytes_sent - claims == ranks.traffic[rank].bytes_sent > 0
    wire.detach()


@pytest.mark.parametrize(
    "spec", [spec if spec in FIRST else pytest.param(spec, marks=pytest.mark.full) for spec in SPECS]
)
def test_virtual_ranks_have_the_bits_of_real_ones(spec, four_ranks):
    four_ranks.run(check_bits, spec)


@pytest.mark.full
def test_many_shards_average_as_one_does():
    """The number of shards changes nothing but the cuts, for a recipe that is exact."""
    found = []
    for replicas, shards in ((1, 4), (4, 1), (2, 2)):
        model = make()
        found.append(train_virtual(VirtualHSDP(model, "fp32", replicas, shards), model, range(1))[-1])
    for name, first in found[0].items():
        assert all(torch.allclose(other[name], first, atol=1e-6) for other in found[1:]), name


def test_wrong_grids_and_missing_gradients_are_refused():
    model = make()
    with pytest.raises(ValueError, match="at least 1 replica"):
        VirtualHSDP(model, "int8", 0, 2)
    with pytest.raises(ValueError, match="VirtualHSDP"):
        VirtualHSDP(model, "auto", 2, 2)
    ranks = VirtualHSDP(model, "int8", 2, 2)
    with pytest.raises(ValueError, match="comes after rank 0"), ranks.backward_of(1):
        pass
    with ranks.backward_of(0):
        loss_of(model, batch(0, 0)).backward()
    with pytest.raises(ValueError, match="from 1 on"):
        ranks.average()


def test_a_backward_pass_that_is_refused_adds_nothing():
    model = torch.nn.Linear(3, 1)
    ranks = VirtualHSDP(model, "fp32", replicas=1, shards=2)
    for rank in range(2):
        with pytest.raises(ValueError, match="parameter bias has no gradient"), ranks.backward_of(rank):
            model.weight.sum().backward()
        with ranks.backward_of(rank):
            model(torch.ones(1, 3)).sum().backward()
    ranks.average()
    assert model.weight.grad.tolist() == [[1.0, 1.0, 1.0]]


def check_mesh(rank):
    """A wire takes the state of virtual ranks of another grid."""
    model = make()
    ranks = VirtualHSDP(model, "int4", replicas=3, shards=5)
    train_virtual(ranks, model, range(2))
    sharded = shard(make(), mesh_of(2, 2))
    with gradwire.attach(sharded, "int4") as wire:
        wire.load_state_dict(ranks.state_dict())
        (own,) = wire.state_dict()["memory"].values()
        assert own["residual:float32"]["odd.weight"].shape == (9, 16)
        assert wire.state_dict()["step"] == 2


@pytest.mark.full
def test_real_ranks_go_on_from_virtual_ones_of_another_grid(four_ranks):
    four_ranks.run(check_mesh)
