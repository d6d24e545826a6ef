"""A backend that gathers rows itself, as NCCL does, changes neither results nor counted bytes."""

import pytest
import torch

import gradwire
from gradwire.buckets import BucketLayout, Memory, Slot
from gradwire.exchanges import Context, Gathered, Scattered, Scratch, average
from gradwire.peers import gather
from gradwire.testing import run_virtual_ranks

NUM_STEPS = 3
CODECS = {spec: gradwire.recipe(spec).exchange.codec for spec in ("int8", "int4", "fp16", "int2")}


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


def run(exchange, shape, world_size, wrap):
    """Run an exchange for some steps; return each rank's results, bytes and gathers."""

    def job(group):
        group = wrap(group)
        scratch, memory = Scratch(), Memory()
        generator = torch.Generator().manual_seed(group.rank)
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        layout = BucketLayout.packed(0, torch.float32, [Slot("p", 0, torch.Size(shape), strides)])
        results = []
        for step in range(NUM_STEPS):
            values = torch.randn(layout.numel, generator=generator)
            average(values, exchange, Context(group, scratch, 1 / group.size, layout, memory, step))
            start, end = (layout.numel * rank // group.size for rank in (group.rank, group.rank + 1))
            results.append(values[start:end] if isinstance(exchange, Scattered) else values)
        return torch.cat(results), group.traffic.bytes_sent, getattr(group, "num_gathers", 0)

    return run_virtual_ranks(job, world_size)


def assert_same(exchange, shape, world_size, num_gathers):
    by_messages = run(exchange, shape, world_size, lambda group: group)
    by_gathers = run(exchange, shape, world_size, Gathering)
    for (values, num_bytes, _), (expected, expected_bytes, _) in zip(by_gathers, by_messages, strict=True):
        assert expected.any()
        assert torch.equal(values, expected)
        assert num_bytes == expected_bytes
    assert {each[2] for each in by_gathers} == {NUM_STEPS * num_gathers}


@pytest.mark.parametrize("numel", [130, 1001, 5000])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_two_ranks_scatter_by_gathering(codec, numel):
    assert_same(Scattered(codec), (numel,), 2, num_gathers=1)


def test_more_ranks_scatter_by_messages():
    assert_same(Scattered(CODECS["int8"]), (1000,), 3, num_gathers=0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_parameters_are_gathered(codec, world_size):
    assert_same(Gathered(codec), (1000,), world_size, num_gathers=1)


@pytest.mark.parametrize(("spec", "numel"), [("int8", 1001), ("int2", 5000), ("int8", 5_000_001)])
def test_encoded_values_of_two_ranks_are_gathered_whatever_their_size(spec, numel):
    assert_same(gradwire.recipe(spec).exchange, (numel,), 2, num_gathers=1)


def test_factors_of_two_ranks_are_gathered():
    assert_same(gradwire.recipe("powersgd:rank=2,factors=int4").exchange, (64, 48), 2, num_gathers=2)
