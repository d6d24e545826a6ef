"""The default dtype of torch, which a program may set for its model, and which nothing of ours depends on."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ranks import run_ranks
from tests.drawn_buckets import Given, draw

SHAPES = (70, 40), (300,), (33, 17)
SPECS = "fp32", "fp16", "int8", "fp8", "int4", "int2", "sign", "sign:rotated=false", "topk", "powersgd:rank=2"


def averages(rank, default):
    """Return the gradients of two steps by each recipe, made while ``default`` is the default dtype."""
    found = {}
    for spec in SPECS:
        model = DistributedDataParallel(Given(*SHAPES))
        torch.set_default_dtype(default)
        with gradwire.attach(model, spec):
            for step in range(2):
                given = draw(10 * rank + step, *SHAPES)
                model.zero_grad()
                model(given).backward()
        torch.set_default_dtype(torch.float32)
        found[spec] = torch.cat([p.grad.flatten() for p in model.parameters()])
    return found


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_averages_do_not_depend_on_the_default_dtype(default):
    wanted, found = run_ranks(averages, 2, args=(torch.float32,)), run_ranks(averages, 2, args=(default,))
    for mine, theirs in zip(found, wanted, strict=True):
        for spec in SPECS:
            assert torch.equal(mine[spec], theirs[spec]), spec
