"""Error feedback loses nothing: results and residuals add up to the gradients."""

import contextlib
import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import recipes
from gradwire.codecs import Raw
from gradwire.ddp import ddp_attachment_of
from gradwire.exchanges import TwoShot
from gradwire.recipes import detect_node_size
from gradwire.testing import run_ranks
from tests.sizes import usually

FP32_ROUNDING = 2.0**-20  # of the largest sum, over a dozen steps of a few roundings each
BF16_ROUNDING = 2.0**-5


class Net(nn.Module):
    """A model with a transposed and a channels_last weight and a layer that is not always used."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(45, 61)
        self.sometimes = nn.Linear(61, 61)
        self.head = nn.Linear(61, 3)

    def forward(self, x, use_sometimes):
        x = self.first(self.conv(x).flatten(1)).relu()
        if use_sometimes:
            x = x + self.sometimes(x)
        return self.head(x)


def held_back(wire):
    """Return the mean over ranks of every parameter's residual."""
    residuals = ddp_attachment_of(wire).state.memory.named().get("residual", {})
    means = {}
    for name, residual in sorted(residuals.items()):
        means[name] = residual.double().clone()
        dist.all_reduce(means[name])
        means[name] /= dist.get_world_size()
    return means


def largest_loss(spec, rank, *, find_unused):
    """Return the largest part of any sum of gradients that is lost over steps and a rebuild of buckets."""
    torch.manual_seed(0)
    net = Net()
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01, find_unused_parameters=find_unused)
    put_in = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in net.named_parameters()}
    came_out = copy.deepcopy(put_in)
    with gradwire.attach(model, spec) as wire:
        layouts = set()
        for step in range(12):
            torch.manual_seed(100 * step + rank)
            x = torch.randn(4, 3, 5, 5)
            # On no rank, on one rank, on all.
            use_sometimes = not find_unused or step % 3 == 2 or (step % 3 == 1 and rank == 0)
            for module in (model, local):
                module.zero_grad()
                module(x, use_sometimes).square().sum().backward()
            layouts.add(tuple(bucket.slots for bucket in wire.layout()))
            for (name, p), q in zip(net.named_parameters(), local.parameters(), strict=True):
                if q.grad is not None:
                    put_in[name] += q.grad
                if p.grad is not None:
                    came_out[name] += p.grad
        kept = held_back(wire)
        assert kept, "there is something to hold back"
    assert find_unused or len(layouts) == 2, "DDP rebuilds its buckets after the first step"
    worst = 0.0
    for name, total in put_in.items():
        dist.all_reduce(total)
        mean = total / dist.get_world_size()
        worst = max(worst, float((mean - came_out[name] - kept[name]).abs().max() / mean.abs().max()))
    return worst


def job_law(rank, specs):
    return {
        spec: max(largest_loss(spec, rank, find_unused=unused) for unused in (False, True)) for spec in specs
    }


@pytest.mark.parametrize("world_size", usually(4, otherwise=[2, 3]))
def test_inputs_equal_outputs_and_residuals_over_rebuilds_and_with_unused_parameters(world_size):
    specs = [
        *(f"{kind}:feedback=true" for kind in ("int8", "fp8", "int4", "sign")),
        "sign:feedback=true,rotated=false",
        "int4:rotated=true",
        "int4:rounding=stochastic",
    ]
    if world_size == 4:
        specs += ["int4:local_size=2", "sign:feedback=true,local_size=2"]
        specs += [f"sign:feedback=true,local_size=2,{option}" for option in ("within=same", "rotated=false")]
    rounded = "sign:feedback=true,residual=bf16"
    lost = run_ranks(job_law, world_size, timeout=120, args=([*specs, rounded],))[0]
    assert lost.pop(rounded) <= BF16_ROUNDING
    assert all(part <= FP32_ROUNDING for part in lost.values()), lost


# --- bytes: predicted and counted ---


def check_bytes(rank, spec):
    world_size = dist.get_world_size()
    for numel in (1, 63, 1000, 70_001):
        net = nn.Linear(numel, 1, bias=False)
        model = DistributedDataParallel(net)
        with gradwire.attach(model, spec) as wire:
            for _ in range(2):
                model(torch.ones(1, numel)).sum().backward()
            expected = wire.recipe.wire_bytes(numel, rank=rank, world_size=world_size)
            counted = [sum(b.bytes_sent for b in step.buckets) for step in wire.stats().steps]
            assert counted == [expected] * 2, numel
            bits = {"int8": 8, "int4": 4, "sign": 1}[spec.split(":")[0]]
            within, across = wire.recipe.link_bytes(numel, rank=rank, world_size=world_size)
            assert within + across == expected
            if "local_size" not in spec:
                bound = 2 * (world_size - 1) / world_size * numel * bits / 8
                # A scale of two bytes per block, chunks in whole units of 64 values and even bytes.
                scales = 2 * (world_size - 1) * (2 * (numel / wire.recipe.exchange.codec.block + 1) + 66)
                assert expected <= bound + scales


@pytest.mark.parametrize("spec", ["int8", "int4", "sign", "int8:local_size=2", "int4:local_size=2"])
def test_the_bytes_sent_are_those_announced(spec, four_ranks):
    four_ranks.run(check_bytes, spec)


def test_two_levels_send_a_nodes_share_through_its_card():
    numel, world_size, local_size = 1 << 20, 16, 8
    flat, deep = gradwire.recipe("int8"), gradwire.recipe(f"int8:local_size={local_size}")

    def through_the_card(recipe, ranks):
        return sum(recipe.link_bytes(numel, rank=r, world_size=world_size)[1] for r in ranks)

    # Of what a rank sends in one level, 7 of 15 parts stay in its node.
    flat_bytes = through_the_card(flat, range(local_size)) * local_size / (world_size - 1)
    assert flat_bytes / through_the_card(deep, range(local_size)) == pytest.approx(local_size, rel=0.01)


# --- nodes, as a launcher announces them ---


@contextlib.contextmanager
def launched(sizes, local_ranks, names=("LOCAL_WORLD_SIZE", "LOCAL_RANK")):
    """Set what a launcher tells this rank, if anything."""
    before = dict(os.environ)
    os.environ.pop("LOCAL_RANK")
    said = dict(zip(names, (sizes[dist.get_rank()], local_ranks[dist.get_rank()]), strict=True))
    os.environ.update({name: str(value) for name, value in said.items() if value is not None})
    yield
    os.environ.clear()
    os.environ.update(before)


BY_SLOT, BY_NODE = [0, 1, 0, 1], [0, 0, 1, 1]
MPIRUN = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


def names_of_all(rank):
    """Return what recipes become, by each way to a wire."""
    model = DistributedDataParallel(nn.Linear(300, 3))
    specs = ("int8", "int8:local_size=1", "fp32", "route(bias=fp32; *=schedule(0=int8; 9=fp32))")
    names = []
    with gradwire.attach(model, "int4") as wire:
        for spec in specs:
            wire.swap(spec)
            model(torch.ones(1, 300)).sum().backward()
            names.append(str(wire.recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.LocalSGD(model, optimizer, period=1, warmup_steps=1, recipe="int8") as local:
        names.append(str(local.recipe))
    return names


def name_of(model):
    with gradwire.attach(model, "int8") as wire:
        model(torch.ones(1, 300)).sum().backward()
        return str(wire.recipe)


def job_launched(rank):
    model = DistributedDataParallel(nn.Linear(300, 3))
    deep = ["int8:local_size=2", "int8:local_size=1", "fp32"]
    deep += ["route(bias=fp32; *=schedule(0=int8:local_size=2; 9=fp32))", "int8:local_size=2"]
    with launched([2] * 4, BY_SLOT):
        assert names_of_all(rank) == deep
        subgroup = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        assert name_of(DistributedDataParallel(nn.Linear(300, 3), process_group=subgroup)) == "int8"
    with launched([2] * 4, BY_NODE):  # ranks 0 and 3 sit where they would anyway
        assert names_of_all(rank) == [name.replace(":local_size=2", "") for name in deep]
    with launched([2] * 4, BY_SLOT, MPIRUN):
        assert name_of(model) == "int8:local_size=2"
    with launched([2] * 4, BY_NODE, MPIRUN):
        assert name_of(model) == "int8"
    with launched([1, 1, 2, 2], [0, 0, 0, 1]):  # one node of two ranks, which are in place
        assert name_of(model) == "int8"
    for sizes, local_ranks in (
        ([4] * 4, [0, 1, 2, 3]),
        ([3, 3, 3, 1], [0, 1, 2, 0]),
        ([2] * 4, [None] * 4),
        (["all"] * 4, BY_SLOT),
        ([0] * 4, BY_SLOT),
    ):
        with launched(sizes, local_ranks):
            assert detect_node_size(model.process_group) == 1, (sizes, local_ranks)


def test_nodes_are_taken_from_the_launchers_environment_if_it_puts_their_ranks_side_by_side():
    run_ranks(job_launched, 4)


def job_uneven(rank):
    model = DistributedDataParallel(nn.Linear(3, 3))
    for spec in ("int8:local_size=2", "schedule(0=fp32; 9=int8:local_size=2)"):
        with pytest.raises(ValueError, match="recipe int8:local_size=2: 3 ranks cannot be nodes of 2"):
            gradwire.attach(model, spec)


def test_ranks_that_cannot_be_such_nodes_are_refused_at_attach():
    run_ranks(job_uneven, 3)
    with pytest.raises(ValueError, match="number of ranks in a node, not 0"):
        gradwire.recipe("int8:local_size=0")
    with pytest.raises(ValueError, match="leaves out nothing that feedback could keep"):
        TwoShot(Raw(), torch.float32)
    with pytest.raises(ValueError, match="residual must be 'fp32' or 'bf16', not 'fp64'"):
        recipes.int4(residual="fp64")


def job_alone(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 3))
    with gradwire.attach(model, "int4") as wire:
        model(torch.ones(2, 5)).square().sum().backward()
        memory = ddp_attachment_of(wire).state.memory
        memory.named()["residual"]["weight"].fill_(0.25)
        before = model.module.weight.grad.clone()
        model.zero_grad()
        model(torch.ones(2, 5)).square().sum().backward()
        assert torch.equal(model.module.weight.grad, before + 0.25)
        assert not memory.named()["residual"]["weight"].any()


def test_a_rank_alone_sends_nothing_and_lets_go_what_it_holds():
    run_ranks(job_alone, 1)
