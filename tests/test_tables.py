"""Parameters over a vocabulary, which `sign` and low rank leave to another recipe."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.recipes import route_module_tables, route_tables, table_names, with_node_size
from gradwire.testing import VirtualRanks, run_ranks


class Words(nn.Module):
    """A model that guesses a word from another; most rows of its tables get no gradient in a step."""

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


def test_tables_are_embeddings_and_the_layers_that_predict_what_they_stand_for():
    assert table_names(Words()) == ["embed.weight", "head.weight", "head.bias"]
    assert table_names(Words(tied=True)) == ["embed.weight", "head.bias"], "a shared parameter has one name"
    assert table_names(Words(sparse=True)) == [], "sparse gradients are not compressed"
    assert table_names(nn.Linear(16, 60)) == []
    sign = gradwire.recipe("sign")
    assert route_module_tables(sign, nn.Embedding(7, 3), ["weight"]) == sign, "nothing to keep apart from"


class Decoder(nn.Module):
    """The shapes of GPT-2: words and positions, equal blocks, and a head that may share the words' weight."""

    def __init__(self, num_words, length, width, *, tied=False, layer=nn.TransformerEncoderLayer):
        super().__init__()
        self.words, self.places = nn.Embedding(num_words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(layer(width, 1, 4 * width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_words)
        if tied:
            self.head.weight = self.words.weight


class Fused(nn.Module):
    """A block with fused layers: one for queries, keys and values, one for gates and values."""

    def __init__(self, width, _num_heads, hidden):
        super().__init__()
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)


EMBEDDINGS, HEAD = ["words.weight", "places.weight"], ["head.weight", "head.bias"]


@pytest.mark.parametrize("length", [10, 16, 48, 64, 128])
def test_layers_as_large_as_a_table_of_places_are_no_tables(length):
    """Have as many positions as a block's layers have inputs or outputs: 1, 3, 4 or 8 times the width."""
    for layer in (nn.TransformerEncoderLayer, Fused):
        assert table_names(Decoder(60, length, 16, layer=layer)) == EMBEDDINGS + HEAD
        assert table_names(Decoder(60, length, 16, layer=layer, tied=True)) == EMBEDDINGS + HEAD[1:]


def test_a_head_is_found_though_blocks_have_layers_of_its_size():
    for num_words in (16, 64):  # bytes, with 256 for the width or for what is in a block
        for tied in (True, False):
            found = table_names(Decoder(num_words, 10, 16, tied=tied))
            assert found == EMBEDDINGS + HEAD[tied:], (num_words, tied)


def test_every_vocabulary_has_its_own_head():
    net = nn.Module()
    net.source, net.target, net.kinds = nn.Embedding(50, 8), nn.Embedding(70, 8), nn.EmbeddingBag(30, 8)
    net.recur = nn.LSTM(8, 20)  # its matrices have 80 rows
    net.places = nn.Embedding(80, 8)
    net.to_target, net.to_kind = nn.Linear(20, 70), nn.Linear(20, 30, bias=False)
    net.to_score = nn.Linear(20, 1)
    embeddings = ["source.weight", "target.weight", "kinds.weight", "places.weight"]
    assert table_names(net) == [*embeddings, "to_target.weight", "to_target.bias", "to_kind.weight"]


@pytest.mark.parametrize(("width", "length"), [(96, 64), (512, 256)])
def test_tables_of_the_published_runs(width, length):
    lm = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "lm.py"))["LM"]
    with torch.device("meta"):
        net = lm(width, 2, length)
    assert table_names(net) == ["bytes.weight", "places.weight", "head.weight", "head.bias"]


def test_what_goes_apart_can_be_chosen_and_is_part_of_the_recipe():
    names = ["e.w"]
    for spec, wanted in {
        "sign": "route(e.w=int4; *=sign:tables=same)",
        "sign:tables=int8,local_size=2": "route(e.w=int8:local_size=2; *=sign:local_size=2,tables=same)",
        "acp:tables=bf16,reduction=sum": "route(e.w=bf16:reduction=sum; *=acp:reduction=sum,tables=same)",
        "powersgd:factors=int4": "route(e.w=int4; *=powersgd:tables=same,factors=int4)",
        "schedule(0=int4; 9=sign)": "route(e.w=int4; *=schedule(0=int4; 9=sign:tables=same))",
        "schedule(0=sign; 5=fp32; 9=acp:tables=fp32)": "route(e.w=schedule(0=int4; 5=fp32); "
        "*=schedule(0=sign:tables=same; 5=fp32; 9=acp:tables=same))",
        "schedule(0=int8; 9=sign:tables=same)": "schedule(0=int8; 9=sign:tables=same)",
        "route(b.*=fp32; *=sign)": "route(b.*=fp32; *=sign)",
        "powersgd:tables=same": "powersgd:tables=same",
        "int4": "int4",
    }.items():
        fitted = route_tables(gradwire.recipe(spec), names)
        assert str(fitted) == wanted
        assert gradwire.recipe(wanted) == fitted == route_tables(fitted, names)
    assert route_tables(gradwire.recipe("sign"), []) == gradwire.recipe("sign")
    for odd in ("a=b", "a<2", "(a)", "a)"):
        assert route_tables(gradwire.recipe("sign"), [odd]) == gradwire.recipe("sign"), odd
    with pytest.raises(ValueError, match="tables must be one of 'same', 'fp32'"):
        gradwire.RECIPES["sign"](tables="int2")


def test_every_recipe_in_a_composed_one_is_placed_on_nodes_as_it_is_alone():
    for spec, wanted in {
        "sign:tables=int8": "sign:local_size=4,tables=int8",
        "schedule(0=fp32; 9=sign)": "schedule(0=fp32; 9=sign:local_size=4)",
        "route(a=int4:local_size=1; *=schedule(0=bf16; 9=acp))": "route(a=int4:local_size=1; "
        "*=schedule(0=bf16:local_size=4; 9=acp))",
    }.items():
        found = with_node_size(gradwire.recipe(spec), 4)
        assert str(found) == wanted
        assert gradwire.recipe(wanted) == found == with_node_size(found, 2)


SPECS = ["sign", "sign:feedback=true,tables=int8", "schedule(0=int4; 2=sign:rotated=false)"]


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
                if step != 1:  # which is exchanged in the buckets of the first
                    sent = sum(bucket.bytes_sent for bucket in wire.stats().steps[-1].buckets)
                    assert wire.plan(step).bytes_sent == sent, (spec, step)
            (memory,) = wire.state_dict()["memory"].values()
            plan = str(wire.plan())
            wire.swap("fp32")
            model.zero_grad()
            model(words(0, rank)).backward()
            assert wire.recipe == gradwire.fp32()
        found[spec] = gradients, set(memory.get("residual:float32", ())), plan
    return found


def exact(step):
    """Return the mean over two ranks."""
    net = Words()
    for rank in range(2):
        (net(words(step, rank)) / 2).backward()
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.fixture(scope="module")
def apart_on_ranks():
    return run_ranks(job_apart, 2)


def test_tables_go_by_their_own_recipe_on_all_ranks(apart_on_ranks):
    real = apart_on_ranks
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
        ranks.average()
        for gradients in (ranks.gradients(0), real[0][spec][0][0]):
            for name, mean in exact(0).items():
                # Twice a rounding to 7 steps on either side of zero.
                error = (gradients[name] - mean).abs().max() / mean.abs().max()
                assert name not in tables or error <= 0.2, (spec, name)


def test_a_stage_of_a_schedule_leaves_tables_to_their_recipe_as_it_does_alone(apart_on_ranks):
    gradients, held, plan = apart_on_ranks[0]["schedule(0=int4; 2=sign:rotated=false)"]
    assert "*=schedule(0=int4; 2=sign:tables=same,rotated=false)" in plan
    assert "embed.weight=int4 " in plan
    assert {"embed.weight", "head.weight", "head.bias"} == held, "int4 goes on; sign sends what it was left"
    for step, gradient in enumerate(gradients):
        mean = exact(step)["embed.weight"]
        error = (gradient["embed.weight"] - mean).norm() / mean.norm()
        assert error <= 0.25, step  # by sign, more than 1
        num_magnitudes = gradient["hidden.weight"].abs().unique().numel()
        assert (num_magnitudes > 2) == (step < 2), "each half of the others, from step 2 on, has one"
