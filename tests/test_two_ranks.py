"""Two ranks send each other all encoded values, and encode no sum."""

import pytest
import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.codecs import Blocks, Cast, Rotated, Top
from gradwire.exchanges import Context, Scratch, TwoShot, average
from gradwire.exchanges.scatter import Seeds
from gradwire.ops import NO_SEED, Chunk
from gradwire.testing import run_virtual_ranks

NUMEL, INDEX, STEP = 70_001, 3, 5
LAYOUT = BucketLayout(INDEX, torch.float32, (Slot("p", 0, torch.Size([NUMEL]), (1,)),))


def draw(rank):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def averages(exchange, num_ranks):
    def job(group):
        flat = draw(group.rank)
        average(flat, exchange, Context(group, Scratch(), 1 / num_ranks, LAYOUT, step=STEP))
        return flat

    return run_virtual_ranks(job, num_ranks)


def decoded(codec, rank):
    """Return what a row of all of a rank's values decodes to."""
    seed = Seeds(0, STEP, INDEX).of(rank, 0) if codec.stochastic else NO_SEED
    row, values = torch.zeros(codec.wire_bytes(NUMEL), dtype=torch.uint8), draw(rank)
    codec.encode(Chunk(values, row, None, seed))
    codec.decode(row, values, seed)
    return values


CODECS = [Blocks("int8", 256), Blocks("int4", 128), Rotated(2), Rotated.of(1, 1), Cast(torch.float16), Top()]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_two_ranks_end_with_the_mean_of_what_their_rows_decode_to(codec):
    first, second = averages(TwoShot(codec), 2)
    assert torch.equal(first, second)
    assert torch.equal(first, decoded(codec, 0) * 0.5 + decoded(codec, 1) * 0.5)


@pytest.mark.parametrize("spec", ["int8", "int4:feedback=false", "int3", "int2", "sign"])
def test_the_squared_error_is_about_half_of_that_of_more_ranks(spec):
    errors = {}
    for num_ranks in (2, 4):
        exact = sum(draw(rank).double() for rank in range(num_ranks)) / num_ranks
        error = averages(gradwire.recipe(spec).exchange, num_ranks)[0] - exact
        errors[num_ranks] = float(error.square().sum() / exact.square().sum())
    assert 0.2 * errors[4] < errors[2] < 0.65 * errors[4]


@pytest.mark.parametrize(
    ("spec", "num_rounds"),
    [("int8", 1), ("bf16", 1), ("fp32", 2), ("int2:bits=1+2", 2), ("int8:local_size=2,within=same", 1)],
)
def test_values_as_they_are_and_rows_that_are_coarser_to_owners_take_two_rounds(spec, num_rounds):
    rounds = gradwire.recipe(spec).exchange.link_rounds(LAYOUT, 2, 0)
    assert sum(rounds) == num_rounds


def test_nodes_take_one_round_if_there_are_two_of_them():
    exchange = gradwire.recipe("int8:local_size=2").exchange
    assert [exchange.link_rounds(LAYOUT, num_ranks, 0) for num_ranks in (4, 6)] == [(2, 1), (2, 2)]
