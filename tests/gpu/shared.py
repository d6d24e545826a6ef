"""Ranks that share a GPU at the same time: their averages are right, and the service ends with its block."""

import shutil

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ranks import runs_at_once, sharing_gpus
from gradwire.testing import run_ranks
from tests.gpu.models import group_of


def job_average(rank):
    """Return on rank 0 if the ranks run at the same time."""
    group = group_of(rank, "cuda")
    model = DistributedDataParallel(nn.Linear(300, 300, bias=False).cuda(), process_group=group)
    gradwire.attach(model, "fp32")
    for step in range(5):
        model.zero_grad()
        (model(torch.eye(300, device="cuda")) * (rank + step)).sum().backward()
        expected = sum(other + step for other in range(2)) / 2
        assert torch.equal(model.module.weight.grad, torch.full((300, 300), expected, device="cuda"))
    # One rank asks, since the service answers one process at a time.
    return runs_at_once() if rank == 0 else None


def check_shared_gpus():
    has_service = shutil.which("nvidia-cuda-mps-control") is not None
    num_ranks = 2 * torch.cuda.device_count()
    with sharing_gpus(num_ranks) as environment:
        assert bool(environment) == has_service
        assert run_ranks(job_average, 2, timeout=120, environment=environment) == [has_service, None]
    assert not runs_at_once(environment)
    return "at the same time" if has_service else "in turns"


CHECKS = {"ranks share a GPU": check_shared_gpus}
