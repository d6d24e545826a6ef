"""A small model under DDP, and steps that train it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def small_model(**options):
    """Return a model of four layers in several buckets, the same on every rank."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30), nn.Linear(30, 2)
    )
    return DistributedDataParallel(net, bucket_cap_mb=0.001, **options)


def net():
    """Return three layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))


def backward(model, seed=0):
    """Run a backward pass on a batch of this rank's own."""
    model.zero_grad()
    torch.manual_seed(100 * dist.get_rank() + seed)
    model(torch.randn(4, 10)).square().mean().backward()


def gradients(model):
    """Return all gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])
