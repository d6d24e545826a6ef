"""A backend that gathers rows itself, as NCCL does, changes neither results nor counted bytes."""

import pytest
import torch

import gradwire
from gradwire.buckets import BucketLayout, Memory, Slot
from gradwire.exchanges import Context, Scratch, run_rounds
from gradwire.peers import gather
from gradwire.testing import run_virtual_ranks

NUM_STEPS = 3
# Chunks of unequal sizes, an empty one, and a bucket with a tail.
SIZES = ((1,), (64, 65), (1000,), (3000, 130, 5))


class Gathering:
    """A group that gathers whole rows of a matrix, like NCCL's all-gather."""

    native_sum = native_scatter = None

    def __init__(self, group):
        self.rank, self.size, self.post, self.traffic = group.rank, group.size, group.post, group.traffic
        self.num_gathers = 0

    def native_gather(self, matrix, num_bytes):
        assert matrix.is_contiguous()
        self.num_gathers += 1
        before = self.traffic.bytes_sent
        gather(list(matrix), self)
        self.traffic.bytes_sent = before + (self.size - 1) * num_bytes


def averaged(recipe, sizes, world_size, wrap):
    """Average buckets side by side for some steps; return each rank's values, bytes and gathers."""

    def job(group):
        group = wrap(group)
        scratch, memory, exchange = Scratch(), Memory(), gradwire.recipe(recipe).exchange
        generator = torch.Generator().manual_seed(group.rank)
        results = []
        for step in range(NUM_STEPS):
            rounds, first = [], None
            for index, numel in enumerate(sizes):
                values = torch.randn(numel, generator=generator)
                shape = torch.Size([numel // 10, 10]) if numel % 10 == 0 else torch.Size([numel])
                slot = Slot(f"p{index}", 0, shape, (10, 1) if len(shape) == 2 else (1,))
                layout = BucketLayout.packed(index, torch.float32, [slot])
                context = Context(group, scratch.part(index), 1 / group.size, layout, memory, step)
                first = first or context
                rounds.append(exchange.rounds(values, context))
                results.append(values)
            run_rounds(rounds, Context(group, scratch, first.scale, first.layout, memory, step))
        return torch.cat(results), group.traffic.bytes_sent, getattr(group, "num_gathers", 0)

    return run_virtual_ranks(job, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "recipe", ["int8", "int4", "fp16", "int2:bits=1+2", "topk", "powersgd:rank=2,factors=int4"]
)
def test_results_and_bytes_are_those_of_messages(recipe, sizes, world_size):
    by_messages = averaged(recipe, sizes, world_size, lambda group: group)
    by_gathers = averaged(recipe, sizes, world_size, Gathering)
    for (values, num_bytes, _), (expected, expected_bytes, _) in zip(by_gathers, by_messages, strict=True):
        assert expected.any()
        assert torch.equal(values, expected)
        assert num_bytes == expected_bytes
    if "powersgd" not in recipe:
        # Two ranks gather in both phases, more in the second one alone.
        assert {each[2] for each in by_gathers} == {NUM_STEPS * (2 if world_size == 2 else 1)}
