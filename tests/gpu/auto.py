"""Recipe `auto` on CUDA: over NCCL, and over Gloo through host memory.

`CHECKS` is run by tests/gpu/run.py.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.testing import run_ranks
from tests.gpu.models import group_of

BUDGET = 0.15
NUM_STEPS = 70


def batch_of(rank, step, width, device):
    torch.manual_seed(10 * step + rank)
    return torch.randn(64, width, device=device)


def job_auto(rank, backend, width, device="cuda"):
    """Both ranks decide alike, averages keep the budget, and a resumed run has the same encodings."""
    group = group_of(rank, "cuda" if backend == "nccl" else "cpu")
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(width, width), nn.Tanh()))).to(device)
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=8)
    wire = gradwire.attach(model, f"auto:budget={BUDGET},every=50")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch_of(rank, step, width, device)).square().mean().backward()
        if step == NUM_STEPS - 1:
            local.load_state_dict(net.state_dict())
        optimizer.step()
    told = [None, None]
    dist.all_gather_object(told, [wire.decisions(), [p.grad.double().sum().item() for p in net.parameters()]])
    assert told[0] == told[1]
    decisions = wire.decisions()
    assert decisions
    assert all(each.step_ms > each.exposed_ms >= 0 for each in decisions if each.step_ms is not None)
    local.zero_grad()
    local(batch_of(rank, NUM_STEPS - 1, width, device)).square().mean().backward()
    difference = whole = 0.0
    for p, q in zip(net.parameters(), local.parameters(), strict=True):
        exact = q.grad.double().cpu()
        dist.all_reduce(exact)
        difference += (p.grad.double().cpu() - exact / 2).square().sum().item()
        whole += (exact / 2).square().sum().item()
    error = (difference / whole) ** 0.5
    assert 0 < error < BUDGET, error
    state, sent = wire.state_dict(), wire.plan().bytes_sent
    wire.detach()
    with gradwire.attach(model, f"auto:budget={BUDGET},every=50") as again:
        again.load_state_dict(state)
        assert again.decisions() == decisions
        # Until its first step a wire does not know DDP's buckets, on which blocks depend a little.
        assert abs(again.plan().bytes_sent - sent) < 0.01 * sent
        model(batch_of(rank, NUM_STEPS, width, device)).square().mean().backward()
    return f"error {error:.3f}\n{wire}" if rank == 0 else ""


CHECKS = {
    "auto over NCCL": lambda: "".join(run_ranks(job_auto, 2, timeout=200, args=("nccl", 2048))),
    "auto over Gloo": lambda: "".join(run_ranks(job_auto, 2, timeout=200, args=("gloo", 512))),
}
