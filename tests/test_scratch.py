"""Scratch memory is that of the buckets in use."""

import gc

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def held_bytes():
    """Return the bytes of all tensors of this process."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def check_memory_of_buckets(rank):
    net = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(16)))
    whole = 4 * 16 * 200 * 200
    inputs = torch.ones(2, 200)
    model = DistributedDataParallel(net, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    with gradwire.attach(model, "fp32") as wire:
        for _ in range(3):
            model(inputs).square().mean().backward()
        used = held_bytes()
        num_buckets = len(wire.layout())
    # Each of two workers receives one bucket at a time; before DDP has made them, all parameters are one.
    assert num_buckets == 16
    assert used - held_bytes() < whole / 2


def test_the_memory_of_ddps_first_bucket_is_freed(two_ranks):
    two_ranks.run(check_memory_of_buckets)
