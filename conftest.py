"""One thread for torch, and names for the examples in docstrings."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Before anything imports torch. With more threads, those of several test processes wait for each other:
# tests/test_codecs.py then takes three times the CPU time. And sums are added in another order.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _names_of_examples(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give an example that speaks of ``model`` one in a group of one rank, its inputs, and usual modules."""
    example: Any = getattr(request.node, "dtest", None)
    if example is None or "model" not in "".join(each.source for each in example.examples):
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradwire

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    example.globs.update(torch=torch, gradwire=gradwire, model=model, inputs=torch.ones(8, 64))
    yield
    dist.destroy_process_group()
