"""Momentum that ranks apply before they send: velocities follow their law, and their parameters."""

import itertools
import math

import pytest
import torch
from torch import nn

import gradwire
from gradwire.buckets import BucketLayout, Memory, Slot
from gradwire.exchanges import Context, Scratch, average
from gradwire.recipes import route_tables, scattered
from gradwire.testing import VirtualRanks, run_virtual_ranks

SIZES = {"first": 3000, "second": 700}
LAYOUT = BucketLayout.packed(
    0, torch.float32, [Slot(name, 0, torch.Size([size]), (1,)) for name, size in SIZES.items()]
)
NUM_VALUES = sum(SIZES.values())
MOMENTUM = 0.75  # a product with it has few roundings
SPARSE = f"topk:momentum={MOMENTUM}"
DENSE = f"int4:momentum={MOMENTUM}"


def gradient(rank, step):
    return torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(100 * step + rank))


def run(spec, world_size, num_steps=6, gradients=gradient, *, may_have_unused=False):
    """Average by a recipe on virtual ranks; return results, residuals and velocities by rank and step."""
    exchange = gradwire.recipe(spec).exchange

    def work(group):
        memory, scratch, seen = Memory(), Scratch(), []
        for step in range(num_steps):
            flat = gradients(group.rank, step)
            context = Context(
                group, scratch, 1 / group.size, LAYOUT, memory, step, may_have_unused=may_have_unused
            )
            average(flat, exchange, context)
            states = {
                name: torch.cat([by_parameter[each].flatten() for each in SIZES])
                for name, by_parameter in memory.named().items()
            }
            seen.append((flat, states["residual"], states["velocity"]))
        return seen

    return run_virtual_ranks(work, world_size)


def advance(velocity, gradient):
    return gradient.clone().add_(velocity, alpha=MOMENTUM)


@pytest.mark.parametrize(
    ("spec", "world_size"),
    [*itertools.product([SPARSE, DENSE], [2, 3, 4]), (f"topk:local_size=2,momentum={MOMENTUM}", 4)],
)
def test_results_and_residuals_add_up_to_velocities_which_are_cleared_where_topk_has_sent(spec, world_size):
    ranks = run(spec, world_size)
    zeros = torch.zeros(NUM_VALUES)
    before = [(zeros, zeros)] * world_size
    num_cleared = 0
    for step in range(len(ranks[0])):
        new = [advance(velocity, gradient(rank, step)) for rank, (_, velocity) in enumerate(before)]
        result = ranks[0][step][0]
        held = sum(residual.double() for residual, _ in before)
        left = sum(ranks[rank][step][1].double() for rank in range(world_size))
        there = (sum(each.double() for each in new) + held) / world_size
        assert torch.allclose(result + left / world_size, there, atol=1e-5), step
        for rank, expected in enumerate(new):
            assert torch.equal(ranks[rank][step][0], result), "ranks have the same bits"
            if "topk" in spec:
                expected.masked_fill_(result != 0, 0)
            assert torch.equal(ranks[rank][step][2], expected), (step, rank)
        num_cleared += int((result != 0).sum())
        before = [ranks[rank][step][1:] for rank in range(world_size)]
    assert num_cleared, "something is sent"


def test_without_momentum_there_is_no_velocity_and_the_recipe_is_topk():
    assert gradwire.recipe("topk:momentum=0") == gradwire.recipe("topk")
    memory = Memory()

    def work(group):
        average(
            gradient(0, 0), gradwire.recipe("topk").exchange, Context(group, Scratch(), 1.0, LAYOUT, memory)
        )

    run_virtual_ranks(work, 1)
    assert set(memory.named()) == {"residual"}


@pytest.mark.parametrize("spec", [SPARSE, f"topk:local_size=2,momentum={MOMENTUM}"])
def test_where_nothing_is_encoded_the_result_is_that_of_an_optimizer_with_momentum(spec):
    world_size = 2 if "local_size" in spec else 1  # a single node
    parameter = nn.Parameter(torch.zeros(NUM_VALUES))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=MOMENTUM)
    ranks = run(spec, world_size)
    total = torch.zeros(NUM_VALUES)
    for step, (result, _, _) in enumerate(ranks[0]):
        parameter.grad = sum(gradient(rank, step) for rank in range(world_size)) / world_size
        optimizer.step()
        total -= result
        assert torch.allclose(total, parameter, atol=1e-5)


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("spec", [SPARSE, DENSE])
def test_a_step_that_is_not_finite_leaves_the_velocities_of_all_ranks_as_they_were(spec, poison):
    def poisoned(rank, step):
        values = gradient(rank, step)
        if (rank, step) == (1, 2):
            values[5] = poison
        return values

    for seen in run(spec, 3, 5, poisoned):
        assert not seen[2][0].isfinite().all()
        assert torch.equal(seen[2][2], seen[1][2])
        assert not torch.equal(seen[3][2], seen[2][2])
        assert all(tensor.isfinite().all() for tensor in seen[4])


@pytest.mark.parametrize("spec", [SPARSE, DENSE])
def test_a_parameter_that_no_rank_has_used_keeps_its_velocity_and_its_residual(spec):
    def partly_used(rank, step):
        values = gradient(rank, step)
        if step == 2:
            values[SIZES["first"] :] = 0
        return values

    for seen in run(spec, 3, 4, partly_used, may_have_unused=True):
        kept = slice(SIZES["first"], None)
        assert not seen[2][0][kept].any()
        assert seen[1][2][kept].any()
        for state in (1, 2):
            assert torch.equal(seen[2][state][kept], seen[1][state][kept])
            assert not torch.equal(seen[2][state][: kept.start], seen[1][state][: kept.start])
            assert not torch.equal(seen[3][state][kept], seen[2][state][kept])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 90)
        self.last = nn.Linear(90, 16)

    def forward(self, words):
        return self.last(self.inner(self.embed(words)).tanh())


def train(ranks, model, num_steps):
    """Train by plain SGD, and return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        for rank in range(ranks.world_size):
            seed = 100 * ranks.num_steps + rank
            words = torch.randint(40, (8,), generator=torch.Generator().manual_seed(seed))
            with ranks.backward_of(rank):
                model(words).square().mean().backward()
        ranks.average()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def test_tables_have_the_same_momentum():
    whole = route_tables(gradwire.recipe(SPARSE), ["embed.weight"])
    assert str(whole) == (
        f"route(embed.weight=int4:momentum={MOMENTUM}; *=topk:tables=same,momentum={MOMENTUM})"
    )
    model = Net()
    ranks = VirtualRanks(model, SPARSE, 2)
    train(ranks, model, 2)
    assert set(ranks.memories[0].named()["velocity"]) == {name for name, _ in model.named_parameters()}


def test_a_resumed_run_is_bit_for_bit_the_one_that_was_not_stopped():
    model = Net()
    ranks = VirtualRanks(model, SPARSE, 2)
    train(ranks, model, 3)
    state, weights = ranks.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    wanted = train(ranks, model, 3)
    model.load_state_dict(weights)
    resumed = VirtualRanks(model, SPARSE, 2)
    resumed.load_state_dict(state)
    assert torch.equal(train(resumed, model, 3), wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_on_another_number_of_ranks_velocities_count_as_much_as_before(reduction):
    model, spec = Net(), f"topk:reduction={reduction},momentum=0.5"
    ranks, others = VirtualRanks(model, spec, 4), VirtualRanks(model, spec, 3)
    train(ranks, model, 2)
    others.load_state_dict(ranks.state_dict())
    for state in ("residual", "velocity"):
        for name, _ in model.named_parameters():
            before, after = (
                sum(memory.named()[state][name].double() for memory in each.memories)
                / (each.world_size if reduction == "mean" else 1)
                for each in (ranks, others)
            )
            assert before.any()
            assert torch.allclose(before, after, atol=1e-6)


def test_velocities_follow_the_loss_scale():
    memory = Memory()
    for name in ("residual", "velocity", "P"):
        memory.flat(name, LAYOUT, torch.float32, torch.device("cpu")).fill_(3.0)
    memory.rescale(torch.tensor(0.5))
    values = {name: float(own["first"][0]) for name, own in memory.named().items()}
    assert values == {"residual": 1.5, "velocity": 1.5, "P": 3.0}


def test_what_cannot_be_is_refused_when_it_is_made():
    for wrong in ("1", "-0.1", "nan"):
        with pytest.raises(ValueError, match="momentum must be at least 0 and less than 1"):
            gradwire.recipe(f"topk:momentum={wrong}")
    with pytest.raises(ValueError, match="momentum needs feedback"):
        gradwire.recipe("topk:feedback=false,momentum=0.9")
    with pytest.raises(ValueError, match="tables must be 'int4' or 'same', which apply it, not 'fp32'"):
        gradwire.recipe("topk:tables=fp32,momentum=0.9")
    with pytest.raises(ValueError, match=r"keeps residuals, and a reduce-scatter keeps none: .* momentum="):
        scattered(gradwire.recipe(DENSE))
