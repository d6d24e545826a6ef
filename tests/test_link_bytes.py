"""Predicted bytes and messages are those that are sent, for every exchange and any bucket."""

import pytest
import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Links, Scratch, average
from gradwire.recipes import make_plan
from gradwire.testing import run_virtual_ranks
from tests.rows import ROWS
from tests.sizes import usually

COMPOSED = [
    "int2:block=256",
    "powersgd:rank=4,factors=int4",
    "powersgd:rank=16,factors=int8+int4",
    "acp:rank=4,factors=int2",
    "acp:rank=2,factors=int8,min_compression_rate=0",
    "powersgd:rank=1,start=2",
    "schedule(0=fp32; 1=acp:rank=2; 3=int8)",
    "route(ndim<2=fp32; *=powersgd:rank=2)",
    "route(numel<=64=bf16; p0=schedule(0=int8; 2=acp:rank=1,start=3); *=int4)",
]
# One vector; matrices with vectors beside them, some too many for one round; next to nothing; numbers that
# are pairs, and of 8 and 2 bytes.
BUCKETS = {
    "a vector": ([(70_001,)], torch.float32),
    "matrices": ([(30, 20), (20,), (30, 20), (40, 10, 3), ()], torch.float32),
    "large factors": ([(900, 80), (50,), (70, 900)], torch.float32),
    "one value": ([(1,)], torch.float32),
    "few": ([(9, 7), (0, 3), (2,)], torch.float32),
    "complex": ([(30, 20), (7,)], torch.complex64),
    "double": ([(30, 20), (7,)], torch.float64),
    "half": ([(300, 20), (65,)], torch.bfloat16),
}
NUM_STEPS = 4


def layout_of(shapes, dtype):
    slots = [
        Slot(f"p{i}", 0, torch.Size(shape), torch.empty(shape, device="meta").stride())
        for i, shape in enumerate(shapes)
    ]
    return BucketLayout.packed(5, dtype, slots)


def noted(group):
    """Record every message that a group sends from here on: its peer and its bytes."""
    sent, post = [], group.post

    def post_noted(rows):
        messages = post(rows)
        send = messages.send

        def send_noted(peer, row):
            if row.numel():
                sent.append((peer, row.numel() * row.element_size()))
            send(peer, row)

        messages.send = send_noted
        return messages

    group.post = post_noted
    return sent


def count(exchange, layout, world_size):
    """Return the messages that each rank sends in each step."""

    def job(group):
        memory, scratch, steps = Memory(), Scratch(), []
        messages = noted(group)
        for step in range(NUM_STEPS):
            torch.manual_seed(10 * step + group.rank)
            flat = torch.randn(layout.numel, dtype=layout.dtype)
            average(flat, exchange, Context(group, scratch, 1 / group.size, layout, memory, step))
            steps.append(list(messages))
            messages.clear()
        return steps

    return run_virtual_ranks(job, world_size)


def check(spec, bucket, world_size):
    recipe, layout = gradwire.recipe(spec), layout_of(*BUCKETS[bucket])
    exchange, num_together = recipe.exchange, recipe.local_size or 1
    for rank, steps in enumerate(count(exchange, layout, world_size)):
        for step, messages in enumerate(steps):
            where = spec, bucket, world_size, rank, step
            # Of a recipe without nodes every rank is a node of its own.
            near = [size for peer, size in messages if peer // num_together == rank // num_together]
            far = [size for peer, size in messages if peer // num_together != rank // num_together]
            announced = exchange.link_bytes(layout, world_size, step)
            assert len(announced) == world_size
            assert announced[rank] == Links(sum(near), sum(far)), where
            rounds = exchange.link_rounds(layout, world_size, step)
            most = rounds.within * (num_together - 1), rounds.across * (world_size // num_together - 1)
            assert len(near) <= most[0], where
            assert len(far) <= most[1], where
            if (
                bucket == "large factors" and spec not in COMPOSED
            ):  # every rank has a chunk of all that is sent
                assert (len(near), len(far)) == most, where


@pytest.mark.parametrize("world_size", usually(4, otherwise=[2, 3]))
def test_each_rank_sends_the_bytes_and_messages_that_are_announced(world_size):
    specs = [row.spec for row in ROWS if world_size in row.world_sizes]
    for spec in [*specs, *COMPOSED]:
        for bucket in BUCKETS:
            check(spec, bucket, world_size)


def test_one_rank_sends_nothing():
    for spec in [*(row.spec for row in ROWS if 3 in row.world_sizes), *COMPOSED]:
        for bucket in BUCKETS.values():
            assert gradwire.recipe(spec).exchange.link_bytes(layout_of(*bucket), 1, 3) == [Links(0, 0)]


@pytest.mark.parametrize(
    "spec", ["powersgd", "acp:rank=1", "schedule(0=fp32; 9=acp)", "route(a=fp32; *=int4)"]
)
def test_a_number_of_values_is_not_enough_where_parameters_are_sent_each_in_its_way(spec):
    recipe = gradwire.recipe(spec)
    for tell in (recipe.wire_bytes, recipe.link_bytes):
        with pytest.raises(ValueError, match=r"depends on the parameters in a bucket.* see wire.plan\(\)"):
            tell(1 << 20, world_size=2)


def test_a_bucket_that_is_one_matrix_is_but_its_values():
    # The factors of 1024 x 1024, and a vote.
    assert gradwire.recipe("powersgd:rank=4,whole=true").wire_bytes(1 << 20, world_size=2) == 4 * (
        8 * 1024 + 1
    )


def test_there_is_no_plan_of_a_step_before_the_first():
    layouts, recipe = [layout_of([(8,)], torch.float32)], gradwire.recipe("schedule(0=fp32; 9=int8)")
    assert make_plan(recipe, layouts, 0, 2, step=8).bytes_sent == 32
    with pytest.raises(ValueError, match="counted from 0: there is no step -1"):
        make_plan(recipe, layouts, 0, 2, step=-1)


def test_ranks_that_do_not_make_whole_nodes_are_refused():
    with pytest.raises(ValueError, match="6 ranks cannot be nodes of 4"):
        gradwire.recipe("int8:local_size=4").wire_bytes(1000, world_size=6)
