"""Parameters over a vocabulary, which `sign` and low rank leave to another recipe."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.models import tables_of, with_tables_apart
from gradwire.testing import VirtualRanks, run_ranks


class Words(nn.Module):
    """Guesses a word from another; most rows of its tables have no gradient in one step."""

    def __init__(self, *, tied=False, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(60, 16, sparse=sparse)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 60)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.hidden(self.embed(words)).tanh()).logsumexp(-1).mean()


def words(step, rank):
    return torch.randint(60, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


def test_tables_are_embeddings_and_what_is_as_large_as_they_are():
    assert tables_of(Words()) == ["embed.weight", "head.weight", "head.bias"]
    assert tables_of(Words(tied=True)) == ["embed.weight", "head.bias"], "a shared parameter has one name"
    assert tables_of(Words(sparse=True)) == [], "sparse gradients are not compressed"
    assert tables_of(nn.Linear(16, 60)) == []
    sign = gradwire.recipe("sign")
    assert with_tables_apart(sign, nn.Embedding(7, 3), ["weight"]) == sign, "nothing to keep apart from"


def test_what_goes_apart_can_be_chosen_and_is_part_of_the_recipe():
    names = ["e.w"]
    for spec, wanted in {
        "sign": "route(e.w=int4; *=sign:tables=same)",
        "sign:tables=int8,local_size=2": "route(e.w=int8:local_size=2; *=sign:local_size=2,tables=same)",
        "acp:tables=bf16,reduction=sum": "route(e.w=bf16:reduction=sum; *=acp:reduction=sum,tables=same)",
        "powersgd:tables=same": "powersgd:tables=same",
        "int4": "int4",
    }.items():
        fitted = gradwire.recipe(spec).apart(names)
        assert str(fitted) == wanted
        assert gradwire.recipe(wanted) == fitted
    assert gradwire.recipe("sign").apart([]) == gradwire.recipe("sign")
    assert gradwire.recipe("sign").apart(["odd=name"]) == gradwire.recipe("sign")
    with pytest.raises(ValueError, match="tables must be one of 'same', 'fp32'"):
        gradwire.RECIPES["sign"](tables="int2")


SPECS = ["sign", "sign:feedback=true,tables=int8"]


def job_apart(rank):
    found = {}
    for spec in SPECS:
        model = DistributedDataParallel(Words(), bucket_cap_mb=0.001)
        gradients = []
        with gradwire.attach(model, spec) as wire:
            assert [len(route.parameters) for route in wire.plan().routes] == [1, 1, 1, 2]
            for step in range(4):
                model.zero_grad()
                model(words(step, rank)).backward()
                gradients.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
            assert wire.plan().bytes_sent == sum(b.bytes_sent for b in wire.stats().steps[-1].buckets)
            (memory,) = wire.state_dict()["memory"].values()
            wire.swap("fp32")
            model.zero_grad()
            model(words(0, rank)).backward()
            assert wire.recipe == gradwire.fp32()
        found[spec] = gradients, set(memory.get("residual:float32", ()))
    return found


def test_tables_go_by_their_own_recipe_on_all_ranks():
    real = run_ranks(job_apart, 2)
    tables = {"embed.weight", "head.weight", "head.bias"}
    assert real[0]["sign"][1] == tables, "int4 holds back, sign does not"
    assert real[0]["sign:feedback=true,tables=int8"][1] == {"hidden.weight", "hidden.bias"}
    for spec in SPECS:
        for step, (mine, other) in enumerate(zip(real[0][spec][0], real[1][spec][0], strict=True)):
            assert all(torch.equal(mine[name], other[name]) for name in mine), f"{spec}, step {step}"
        net = Words()
        ranks = VirtualRanks(net, spec, world_size=2)
        assert "embed.weight=int" in str(ranks.recipe)
        for rank in range(2):
            with ranks.backward_of(rank):
                net(words(0, rank)).backward()
        exact = {name: g.clone() / 2 for name, g in ranks.gradients(0).items()}
        for name, gradient in ranks.gradients(1).items():
            exact[name] += gradient / 2
        ranks.average()
        for gradients in (ranks.gradients(0), real[0][spec][0][0]):
            for name in tables:
                # Twice a rounding to 7 steps on either side of zero.
                error = (gradients[name] - exact[name]).abs().max() / exact[name].abs().max()
                assert error <= 0.2, (spec, name)
