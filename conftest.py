"""Names for the examples in docstrings: a DistributedDataParallel model in a group of one rank."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _names_of_examples(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give an example that speaks of ``model`` a model, its inputs, and modules under their usual names."""
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
