"""The kernel that averages through symmetric memory, on ranks that share files instead of GPUs' memory.

Triton's interpreter runs one program after the other. Program p of a rank waits for program p of the others.
"""

import dataclasses

import pytest
import torch
from benchmarks.symmetric_kernel import OneKernel, flag_bytes

import gradwire
from gradwire.buckets import BucketLayout, Slot
from gradwire.exchanges import Context, Scratch, average
from gradwire.exchanges.scatter import aligned, bounds_of
from gradwire.testing import run_ranks, run_virtual_ranks

NUM_CALLS, NUM_PROGRAMS = 4, 2


def exchange_of(recipe):
    return dataclasses.replace(gradwire.recipe(recipe).exchange, feedback=None)


def values_of(rank, call, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * call + rank))


def average_in_one_kernel(rank, recipe, world_size, numel, folder):
    """Return the results of all calls on this rank."""
    form = exchange_of(recipe).codec.format
    bounds = [(0, numel)] if world_size == 2 else list(bounds_of(numel, world_size))
    stride = max(aligned(form.row_bytes(end - start)) for start, end in bounds)
    num_bytes = 2 * world_size * stride + flag_bytes(world_size, NUM_PROGRAMS)
    memories = [
        torch.from_file(f"{folder}/{peer}", shared=True, size=num_bytes, dtype=torch.uint8)
        for peer in range(world_size)
    ]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    kernel = OneKernel(form, rank, addresses, bounds, stride, NUM_PROGRAMS)
    results = [values_of(rank, call, numel) for call in range(NUM_CALLS)]
    for values in results:
        kernel.average(values)
    return results


def average_by_messages(recipe, world_size, numel):
    """Return the results of all calls on each rank."""
    layout = BucketLayout(0, torch.float32, (Slot("values", 0, torch.Size([numel]), (1,)),))

    def job(group):
        results = [values_of(group.rank, call, numel) for call in range(NUM_CALLS)]
        for values in results:
            average(values, exchange_of(recipe), Context(group, Scratch(), 1 / group.size, layout))
        return results

    return run_virtual_ranks(job, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("numel", [700, 5003])
def test_one_kernel_has_the_bits_of_the_exchange(recipe, world_size, numel, tmp_path):
    args = recipe, world_size, numel, str(tmp_path)
    by_kernel = run_ranks(average_in_one_kernel, world_size, timeout=120, args=args)
    by_messages = average_by_messages(recipe, world_size, numel)
    for ours, theirs in zip(by_kernel, by_messages, strict=True):
        for mean, expected in zip(ours, theirs, strict=True):
            assert expected.any()
            assert torch.equal(mean, expected)
