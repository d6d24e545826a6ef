"""``verify_every`` finds parameters that are not the same on every rank, whoever has changed one."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.models import backward


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def skip(model, optimizer):
    """Take no step."""


def step_faster(model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 2
    optimizer.step()


def change_frozen(model, optimizer):
    optimizer.step()
    with torch.no_grad():
        model.module[2].bias[0] += 1e-6


DIVERGING = {"clips": clip, "skips": skip, "steps faster": step_faster, "changes a frozen one": change_frozen}


def check_diverged(rank, name):
    module = net()
    module[2].bias.requires_grad_(False)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.attach(model, "int8", verify_every=2) as wire:
        for step in range(2):
            backward(model, step)
            optimizer.step()
        backward(model, 2)
        if rank == 1:
            DIVERGING[name](model, optimizer)
        else:
            optimizer.step()
        backward(model, 3)  # this step is not compared
        optimizer.step()
        with pytest.raises(gradwire.WireError) as caught:
            backward(model, 4)
        assert wire.failure is None, "the wire goes on"
    text = str(caught.value)
    changed = "2.bias" if name == "changes a frozen one" else "0.weight"
    assert text.startswith(f"rank {rank}, step 4: parameter {changed}"), text
    assert "is not the same on every rank: one on rank(s) 0, 2, another on rank(s) 1." in text
    assert "All were the same at step 2. Ranks have diverged" in text


@pytest.mark.parametrize("name", DIVERGING)
def test_parameters_that_diverge_are_an_error_with_their_name_and_the_last_good_step(name, three_ranks):
    three_ranks.run(check_diverged, name)
