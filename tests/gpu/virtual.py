"""Virtual ranks on CUDA: their averagings are recorded, and end with the bits of those that are not.

`CHECKS` is run by tests/gpu/run.py.
"""

import os

import torch
from torch import nn

from gradwire.testing import VirtualRanks
from tests.gpu.recordings import SPECS

NUM_STEPS = 10


def train(spec, world_size, *, record):
    """Train for some steps; return the gradients of each, the states at the end, traffic, and recordings."""
    os.environ["GRADWIRE_CUDA_GRAPHS"] = str(int(record))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50)).cuda()
    arrival = [name for name, _ in model.named_parameters()][::-1]
    ranks = VirtualRanks(model, spec, world_size, bucket_cap_mb=0.01, arrival=arrival)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for _ in range(NUM_STEPS):
        for rank in range(world_size):
            with ranks.backward_of(rank):
                model(torch.randn(8, 40, device="cuda")).square().mean().backward()
        ranks.average()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
        optimizer.step()
    return gradients, ranks.state_dict(), ranks.traffic, len(ranks._recordings._recorded)


def assert_same(spec, world_size, num_recorded):
    expected, state, traffic, none = train(spec, world_size, record=False)
    actual, recorded_state, recorded_traffic, number = train(spec, world_size, record=True)
    assert (none, number) == (0, num_recorded), (spec, number)
    assert recorded_traffic == traffic, spec
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), (spec, step)
    assert expected[-1].abs().max() > 0
    for name, states in state["memory"].items():
        for key, tensors in states.items():
            for parameter, tensor in tensors.items():
                assert torch.equal(recorded_state["memory"][name][key][parameter], tensor), (spec, name, key)


def check_bits():
    for spec in SPECS:
        is_several = spec.startswith(("acp", "schedule"))
        assert_same(spec, 4, num_recorded=2 if is_several else 1)
    assert_same("int2", 9, num_recorded=1)
    assert_same("topk", 4, num_recorded=0)


CHECKS = {"virtual ranks have the same bits": check_bits}
