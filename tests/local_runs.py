"""A small model, its loss, and checks over ranks, for tests of training loops."""

import torch
import torch.distributed as dist
from torch import nn


def net():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(6 * 9, 20), nn.Tanh(), nn.Linear(20, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 2, 5, 5, generator=generator)


def loss_of(model, rank, step):
    return model(batch(rank, step)).square().mean()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same_on_all_ranks(model):
    mine = flat(model)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone)
