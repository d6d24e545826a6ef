"""A small model, its loss, and checks over ranks, for tests of training loops."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def net():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(6 * 9, 20), nn.Tanh(), nn.Linear(20, 3))


def make(**options):
    """Return a DDP model, its optimizer, and its local SGD."""
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gradwire.LocalSGD(model, optimizer, **options)


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 2, 5, 5, generator=generator)


def loss_of(model, rank, step):
    return model(batch(rank, step)).square().mean()


def train(model, optimizer, local, rank, steps):
    """Train for some steps; return those at which an averaging has ended."""
    ended = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if local.step():
            ended.append(step + 1)
    return ended


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same_on_all_ranks(model):
    mine = flat(model)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone)


def saved_bytes(*states):
    """Return states as a file keeps them."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
