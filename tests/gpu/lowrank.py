"""Low rank on CUDA: the Triton kernel, no waiting for the device, and step times beside torch's hook."""

import statistics
import time

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import powerSGD_hook as hooks
from gradwire.ops.batches import Batch, Batches, Matrix
from gradwire.ops.cuda import low_rank as cuda
from gradwire.ops.reference import low_rank as reference
from gradwire.testing import check_hook, run_ranks
from gradwire.testing.invariants import device_of_rank, groups_of_rank

NUM_STEPS = 10


# k matrices of n x m at rank r; those of one bucket are taken in one launch.
BUCKETS = [
    [(1, 1, 1, 1)],
    [(3, 65, 40, 2), (5, 1000, 300, 4), (2, 4096, 1024, 4), (1, 1024, 4096, 4)],
    [(3, 3072, 1024, 32)],
    [(1, 50257, 64, 4), (1, 64, 64, 4)],
]


def batches_of(shapes):
    batches, first, start, left, right = [], 0, 0, 0, 0
    for k, n, m, r in shapes:
        matrices = tuple(Matrix("", start + i * n * m, n, m) for i in range(k))
        batches.append(Batch(matrices, r, first, start, left, right))
        first, start, left, right = first + k, start + k * n * m, left + k * r * n, right + k * r * m
    return Batches(tuple(batches)), (first, start, left, right)


def close(fast, slow, tolerance=1e-4):
    bound = tolerance * max(1.0, slow.nan_to_num(0, 0, 0).abs().max().item())
    return torch.allclose(fast, slow, rtol=tolerance, atol=bound, equal_nan=True)


def check_kernel():
    for shapes in BUCKETS:
        batches, (num_matrices, numel, num_left, num_right) = batches_of(shapes)
        for magnitude in (1.0, 1e-20, 1e30):
            for has_spare in (False, True):
                vectors, spare = torch.randn(2, num_left, device="cuda")
                vectors *= magnitude
                vectors[: num_left // 3] = 0
                fast, slow = vectors.clone(), vectors.clone()
                for module, out in ((cuda, fast), (reference, slow)):
                    module.orthogonalize(batches, "left", out, spare if has_spare else None)
                assert close(fast, slow), (shapes, magnitude, has_spare)
        for dtype in (torch.float32, torch.bfloat16):
            flat, sums = torch.randn(numel, device="cuda").to(dtype), torch.randn(numel, device="cuda")
            left, own_left = torch.randn(2, num_left, device="cuda")
            right, own_right = torch.randn(2, num_right, device="cuda")
            flat[0] = float("inf")  # the first matrix does not count
            found = []
            for module in (cuda, reference):
                votes = torch.empty(num_matrices, device="cuda")
                bucket, total, p = flat.clone(), sums.clone(), torch.empty_like(left)
                kept = torch.zeros_like(right)
                module.accumulate_and_project(batches, bucket, total, votes, right, p)
                module.judge(batches, "right", right, votes, kept)
                module.finish(batches, bucket, total, left, right, own_left, own_right, votes)
                found.append((bucket.float(), total, p, votes, kept))
            tolerance = 1e-4 if dtype == torch.float32 else 2.0**-7  # the last place of a bf16
            assert all(close(a, b, tolerance) for a, b in zip(*found, strict=True)), (shapes, dtype)


def job_no_waiting(rank):
    """Train with synchronisation as an error: no step may wait for the device."""
    group, _ = groups_of_rank(False, device_of_rank("cuda"))
    for spec in (
        "powersgd",
        "powersgd:rank=4",
        "acp",
        "powersgd:rank=2,whole=true",
        "powersgd:warm_start=false",
    ):
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
    """Return median step times in ms: 8 transformer layers of 1024, 101 M parameters, 2 NCCL ranks."""
    group, _ = groups_of_rank(False, device_of_rank("cuda"))
    batch = torch.randn(8, 128, 1024, device="cuda")
    figures = {}
    ours = ("powersgd:rank=4", "acp:rank=4", "powersgd:rank=4,whole=true", "powersgd", "acp")
    for name in ("noop", "fp32", "torch PowerSGD", *ours):
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
