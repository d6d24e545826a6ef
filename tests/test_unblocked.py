"""Hooks do not wait for other ranks: a backward pass may hold collectives of the user's own."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import default_hooks
from gradwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.testing import run_ranks

LIMIT = timedelta(seconds=60)


class Meeting(torch.autograd.Function):
    """A collective in the backward pass, in a group of the user's own."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(torch.ones(1), group=ctx.group)
        return gradient, None


class Uneven(nn.Module):
    """A model whose first bucket is ready before the collective where `some` is not used.

    It holds `head` and a bias of `some`.
    """

    def __init__(self):
        super().__init__()
        self.first, self.some, self.head = nn.Linear(10, 30), nn.Linear(30, 30), nn.Linear(30, 2)

    def forward(self, x, uses_some, group):
        x = self.first(x)
        if uses_some:
            x = self.some(x)
        return self.head(Meeting.apply(x, group))


def job_uneven(rank, how):
    meeting, group = (dist.new_group(timeout=LIMIT) for _ in range(2))
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Uneven(), find_unused_parameters=True, process_group=group, bucket_cap_mb=0.004
    )
    if how == "attached":
        gradwire.attach(model, torch_hooks.allreduce_hook)
    elif how == "raw":
        model.register_comm_hook(group, default_hooks.allreduce_hook)
    elif how == "powersgd":
        model.register_comm_hook(PowerSGDState(group, start_powerSGD_iter=2), powerSGD_hook)
    own = [torch.randn(4, 10, generator=torch.Generator().manual_seed(each)) for each in range(2)]
    for _ in range(2):
        model.zero_grad()
        model(own[rank], rank == 0, meeting).square().mean().backward()
    assert model._get_ddp_logging_data()["bucket_sizes"] == "368, 4920", "head and the bias of some"
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["attached", "raw", "powersgd"])
def test_a_hook_holds_no_rank_back_from_a_collective_in_its_backward_pass(how):
    expected, found = (run_ranks(job_uneven, 2, args=(each,), timeout=180) for each in ("plain", how))
    torch.testing.assert_close(found, expected)


def job_alone(rank):
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    model.register_comm_hook(group, default_hooks.allreduce_hook)
    if rank == 0:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
        told = r"rank 0, step 0, bucket 0, hook fp32: could not connect to .* rank\(s\) 1 did not come"
        with pytest.raises(gradwire.WireError, match=told):
            model(torch.ones(2, 4)).sum().backward()
    dist.barrier()


def test_a_raw_hook_that_reaches_nobody_fails_its_bucket():
    run_ranks(job_alone, 2, timeout=180)
