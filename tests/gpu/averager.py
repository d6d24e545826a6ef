"""Averagers over two NCCL ranks."""

import os

import torch
import torch.distributed as dist

import gradwire
from gradwire.testing import run_ranks

# The largest error of a mean of two, relative to its largest value; bf16 tensors round to 2**-8.
BOUNDS = {"fp32": 2**-8, "bf16": 2**-7, "int8": 0.02, "int4": 0.2, "powersgd": 2.0}


def tensors_of(rank, step):
    torch.manual_seed(10 * step + rank)
    shapes = {"weight": (64, 48), "bias": (70,)}
    made = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    return {**made, "half": torch.randn(33, device="cuda").bfloat16()}


def job_averager(rank):
    """Means are right and the same on both ranks, also when they are weighted, and without gradwire."""
    os.environ["NCCL_HOSTID"] = str(rank)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(backend="nccl")
    for spec, bound in BOUNDS.items():
        with gradwire.Averager(spec, group) as averager:
            for step in range(3):
                tensors = tensors_of(rank, step)
                exact = {name: tensor.double().cpu() for name, tensor in tensors.items()}
                for tensor in exact.values():
                    dist.all_reduce(tensor)
                averager.start(tensors).wait()
                for name, tensor in tensors.items():
                    mean, result = exact[name] / 2, tensor.double().cpu()
                    assert (result - mean).abs().max() <= bound * mean.abs().max(), (spec, step, name)
                    others = [torch.empty_like(result) for _ in range(2)]
                    dist.all_gather(others, result)
                    assert torch.equal(*others), (spec, step, name)
    with gradwire.Averager("bf16", group) as averager:
        value = torch.full((100,), float(rank + 1), device="cuda")
        averager.average_(value, weight=3 if rank else 1)
        assert value.eq(1.75).all()
    os.environ["GRADWIRE_DISABLE"] = "1"
    with gradwire.Averager("int8", group) as averager:
        value = torch.full((100,), float(rank + 1), device="cuda")
        averager.average_(value)
        assert value.eq(1.5).all()
        chunk = averager.reduce_scatter(torch.full((100,), float(rank + 1), device="cuda"))
        assert averager.all_gather(chunk * (rank + 1)).tolist() == 50 * [1.5] + 50 * [3.0]


CHECKS = {"averager": lambda: run_ranks(job_averager, 2, timeout=120)}
