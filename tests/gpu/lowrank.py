"""Low rank on CUDA: the Triton kernel, no waiting for the device, and step times beside torch's hook."""

import statistics
import time

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import powerSGD_hook as hooks
from gradwire.ops.cuda import low_rank as cuda
from gradwire.ops.reference import low_rank as reference
from gradwire.testing import check_hook, run_ranks
from gradwire.testing.invariants import _device, _groups

NUM_STEPS = 10


def check_kernel():
    for k, r, length in ((1, 1, 1), (3, 2, 65), (2, 4, 4096), (5, 4, 1000), (1, 32, 3072), (1, 4, 50257)):
        vectors, spare = torch.randn(2, k, r, length, device="cuda")
        for magnitude in (1.0, 1e-20, 1e30):
            for other in (None, spare):
                given = vectors * magnitude
                if r > 1:
                    given[:, 1] = 0 if other is None else given[:, 0]
                fast, slow = given.clone(), given.clone()
                cuda.orthogonalize(fast, other)
                reference.orthogonalize(slow, other)
                assert torch.allclose(fast, slow, atol=1e-4), (k, r, length, magnitude)


def job_no_waiting(rank):
    """A step in which the host waits for the device raises."""
    group, _ = _groups(False, _device("cuda"))
    for spec in ("powersgd:rank=4", "acp:rank=4", "powersgd:rank=2,whole=true", "powersgd:warm_start=false"):
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).cuda()
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.5)
        with gradwire.attach(model, spec):
            for step in range(6):
                x = torch.randn(32, 256, device="cuda")
                loss = model(x).square().mean()
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
                loss.backward()
                torch.cuda.set_sync_debug_mode("default")
                assert all(p.grad.isfinite().all() for p in net.parameters())


def torch_state():
    return torch_hooks.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)


def job_steps(rank):
    """Medians in ms a step of 8 transformer layers of 1024, 101 M parameters, 2 NCCL ranks."""
    group, _ = _groups(False, _device("cuda"))
    batch = torch.randn(8, 128, 1024, device="cuda")
    figures = {}
    for name in ("noop", "fp32", "torch PowerSGD", "powersgd", "acp", "powersgd:whole=true"):
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(1024, 8, 4096, dropout=0.0, batch_first=True) for _ in range(8)]
        model = DistributedDataParallel(nn.Sequential(*layers).cuda(), process_group=group)
        if name.startswith("torch"):
            state = torch_state()
            state.process_group = group
            model.register_comm_hook(state, torch_hooks.powerSGD_hook)
        else:
            gradwire.attach(model, name)
        times = []
        for step in range(5 + NUM_STEPS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.zero_grad()
            model(batch).square().mean().backward()
            torch.cuda.synchronize()
            if step >= 5:
                times.append(1e3 * (time.perf_counter() - begin))
        figures[name] = round(statistics.median(times), 1)
        del model
    return figures


def rank_two(group):
    return hooks.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)


CHECKS = {
    "low-rank kernel": check_kernel,
    "low-rank hook": lambda: check_hook(
        hooks.powerSGD_hook, rank_two, tolerance=0.3, floor=1.0, feedback=True, device="cuda"
    ),
    "low-rank without waiting": lambda: run_ranks(job_no_waiting, 2, timeout=180),
    "low-rank steps": lambda: run_ranks(job_steps, 2, timeout=300),
}
