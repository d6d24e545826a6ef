"""A small model on CUDA over NCCL, or on CPU over Gloo, and steps that train it."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

NUM_STEPS = 7
FAULTY_STEP = 3  # DDP has rebuilt its buckets, and every step is exchanged as it arrives
WITH_MEMORY = ("int4", "sign:feedback=true", "powersgd:rank=1")


def group_of(rank, device, timeout_s=60.0):
    timeout = timedelta(seconds=timeout_s)
    if device == "cpu":
        return dist.new_group(backend="gloo", timeout=timeout)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # runs are compared bit for bit
    os.environ["NCCL_HOSTID"] = str(rank)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return dist.new_group(backend="nccl", timeout=timeout)


def model_of(group, device, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
    options = {"bucket_cap_mb": 0.001, **options}
    return DistributedDataParallel(net.to(device), process_group=group, **options)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    batch = torch.randn(4, 10, generator=generator)
    return model(batch.to(next(model.parameters()).device)).square().mean()


def backward(model, step=0, factor=1.0):
    model.zero_grad()
    (loss_of(model, step) * factor).backward()


def raised_by(act, kind=gradwire.WireError):
    """Return the text of the error that ``act`` raises."""
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def gradients_of(model):
    return {name: p.grad.double() for name, p in model.module.named_parameters()}


def held_back(wire, like):
    """Return this rank's residuals in fp64 by parameter, zeros where there are none."""
    (memory,) = wire.state_dict()["memory"].values()
    held = {name: torch.zeros_like(value) for name, value in like.items()}
    for key, tensors in memory.items():
        if key.startswith("residual:"):
            held.update((name, tensor.double().to(held[name].device)) for name, tensor in tensors.items())
    return held


def assert_nothing_lost(what, wanted, sent, held):
    """Check that all results and what ranks still hold back add up to all means."""
    for name in wanted[0]:
        left = held[name].cpu().clone()
        dist.all_reduce(left)
        total, came = (sum(each[name].cpu() for each in steps) for steps in (wanted, sent))
        error = (came + left / dist.get_world_size() - total).abs().max() / total.abs().max()
        assert error < 1e-5, (what, name, float(error))
