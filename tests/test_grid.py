"""Averages over a grid of ranks: the same bits everywhere, nothing lost, and a grid from 32 ranks on."""

import pytest
import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.recipes import placed
from gradwire.testing import run_virtual_ranks
from tests.sizes import usually

NUMEL = 5003
NUM_STEPS = 3
LAYOUT = BucketLayout.packed(0, torch.float32, [Slot("p", 0, torch.Size([NUMEL]), (1,))])


def gradient(rank, step):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


def averaged(spec, world_size):
    """Return the results of every step and what is held back at the end, by rank."""
    exchange = gradwire.recipe(spec).exchange

    def job(group):
        memory, scratch, results = Memory(), Scratch(), []
        for step in range(NUM_STEPS):
            flat = gradient(group.rank, step)
            average(flat, exchange, Context(group, scratch, 1 / group.size, LAYOUT, memory, step))
            results.append(flat)
        held = memory.flat("residual", LAYOUT, torch.float32, flat.device) if exchange.feedback else None
        return results, held

    return run_virtual_ranks(job, world_size)


@pytest.mark.parametrize(("world_size", "columns"), [(6, 3), (6, 2), (12, 4)])
@pytest.mark.parametrize("recipe", ["int8:", "int4:feedback=false,", "bf16:", "int2:"])
def test_every_rank_gets_the_same_bits_near_the_mean(recipe, world_size, columns):
    plain = averaged(f"{recipe}local_size=1", world_size)[0][0]
    ranks = averaged(f"{recipe}local_size={columns},within=same", world_size)
    for step, results in enumerate(zip(*(results for results, _ in ranks), strict=True)):
        assert all(torch.equal(results[0], other) for other in results)
        exact = torch.stack([gradient(rank, step) for rank in range(world_size)]).double().mean(0)
        error, allowed = (float((each - exact).norm() / exact.norm()) for each in (results[0], plain[step]))
        # Sums of rows are encoded once more, with an error of their own.
        assert 0 < error < 2 * allowed


@pytest.mark.parametrize("world_size", usually(6, otherwise=[8, 12]))
def test_what_three_encodings_leave_out_is_held_back(world_size):
    ranks = averaged("int4:local_size=2,within=same", world_size)
    given = sum(gradient(rank, step) for rank in range(world_size) for step in range(NUM_STEPS))
    sent = world_size * sum(ranks[0][0])
    held = sum(residual for _, residual in ranks)
    assert float(held.norm()) > 0.01 * float(given.norm())
    torch.testing.assert_close(sent + held, given, rtol=0, atol=1e-4)


def test_many_ranks_without_nodes_become_a_grid():
    names = {size: str(placed(gradwire.recipe("int4"), 1, size)) for size in (31, 32, 36, 37, 1024)}
    assert names == {
        31: "int4",
        32: "int4:local_size=4,within=same",
        36: "int4:local_size=6,within=same",
        37: "int4",
        1024: "int4:local_size=32,within=same",
    }
    assert str(placed(gradwire.recipe("int4"), 8, 1024)) == "int4:local_size=8"
    for kept in ("int4:local_size=1", "fp32", "powersgd", "auto", "noop"):
        assert str(placed(gradwire.recipe(kept), 1, 64)) == kept
    assert str(placed(gradwire.recipe("route(a=fp32; *=sign)"), 1, 64)) == (
        "route(a=fp32; *=sign:local_size=8,within=same)"
    )


def test_the_option_is_explained():
    with pytest.raises(ValueError, match="option 'within' must be fp32 or same, not 'int8'"):
        gradwire.recipe("int8:local_size=2,within=int8")
