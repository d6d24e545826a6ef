"""The CUDA tests: two NCCL ranks, which share a GPU if there is only one. Skips nothing.

A plain script that needs nothing but torch: python -m tests.gpu.run. To run only some checks, give the
beginnings of their names: python -m tests.gpu.run kernels "matrix int4"
"""

import copy
import itertools
import math
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import default_hooks
from gradwire.ops import NO_RANK, BlockFormat, Chunk, Seed, Terms
from gradwire.ops.cuda import blocks as cuda_blocks
from gradwire.ops.cuda import casts as cuda_casts
from gradwire.ops.reference import blocks as reference_blocks
from gradwire.ops.reference import casts as reference_casts
from gradwire.testing import cases, check_hook, run_ranks
from tests.gpu import (
    auto,
    averager,
    face,
    faults,
    lowrank,
    outer,
    recordings,
    resume,
    rotated,
    sharded,
    shared,
    telemetry,
    trust,
    virtual,
)
from tests.rows import ROWS


def nccl_group(rank):
    os.environ["NCCL_HOSTID"] = str(rank)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return dist.new_group(backend="nccl")


def mean_of(local):
    total = local.double().cpu()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def job_streams(rank):
    """Average gradients that the device still computes when the hook is called, and read them at once."""
    group = nccl_group(rank)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(6))).cuda()
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=8)
    with gradwire.attach(model, "bf16") as wire:
        for step in range(5):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(8192, 2048, device="cuda")
            model.zero_grad()
            local.zero_grad()
            local(x).square().mean().backward()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(x).square().mean().backward()
            host = time.perf_counter() - begin
            sums = [p.grad.double().sum() for p in net.parameters()]  # no synchronisation in between
            torch.cuda.synchronize()
            device = time.perf_counter() - begin
            for p, q, s in zip(net.parameters(), local.parameters(), sums, strict=True):
                expected = mean_of(q.grad)
                assert (p.grad.cpu().double() - expected).abs().max() <= 2.0**-7 * expected.abs().max()
                assert s == p.grad.double().sum()
        assert wire.stats().steps[-1].buckets[0].wait_ms is None
    return f"host {1e3 * host:.1f} ms, device {1e3 * device:.1f} ms"


def job_errors(rank):
    group = nccl_group(rank)

    def bare(value):
        future = torch.futures.Future()
        future.set_result(value)
        return future

    def failed(state, bucket):
        future = torch.futures.Future()
        future.set_exception(KeyError("set on the future"))
        return future

    bad = {
        "a bare future of None": (lambda s, b: bare(None), TypeError),
        "a bare future of a number": (lambda s, b: bare(3), TypeError),
        "an exception on the future": (failed, KeyError),
        "not a future": (lambda s, b: b.buffer(), TypeError),
        "wrong dtype": (
            lambda s, b: torch_hooks.allreduce_hook(group, b).then(lambda f: f.value().half()),
            TypeError,
        ),
        "wrong size": (
            lambda s, b: torch_hooks.allreduce_hook(group, b).then(lambda f: f.value()[:-1]),
            ValueError,
        ),
        "wrong device": (
            lambda s, b: torch_hooks.allreduce_hook(group, b).then(lambda f: f.value().cpu()),
            ValueError,
        ),
    }
    for name, (hook, kind) in bad.items():
        model = DistributedDataParallel(nn.Linear(4, 4).cuda(), process_group=group)
        gradwire.attach(model, hook)
        for _ in range(2):
            try:
                model(torch.ones(1, 4, device="cuda")).sum().backward()
            except gradwire.WireError as error:
                assert isinstance(error, kind), name
                assert f"rank {rank}, step 0, bucket 0, hook" in str(error)
            else:
                raise AssertionError(f"{name} was taken")


def job_sparse_and_raw(rank):
    group = nccl_group(rank)
    torch.manual_seed(0)
    embedding = nn.Embedding(50, 4, sparse=True).cuda()
    local = copy.deepcopy(embedding)
    model = DistributedDataParallel(embedding, process_group=group)
    gradwire.attach(model, "bf16")
    indices = torch.tensor([rank, rank, 7, 10 + rank], device="cuda")
    for module in (model, local):
        module(indices).square().sum().backward()
    expected = mean_of(local.weight.grad.to_dense())
    assert torch.allclose(embedding.weight.grad.to_dense().cpu().double(), expected)

    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
    ):
        net = nn.Linear(3, 1, bias=False).cuda()
        model = DistributedDataParallel(net, process_group=group)
        model.register_comm_hook(group, hook)
        for _ in range(2):
            model.zero_grad()
            (model(torch.ones(1, 3, device="cuda")) * (80000.0 if rank == 0 else 0.0)).sum().backward()
            assert torch.equal(
                net.weight.grad.cpu(), torch.full((1, 3), 40000.0).to(net.weight.grad.dtype)
            ) or (hook is default_hooks.bf16_compress_hook)
            assert (net.weight.grad.cpu() - 40000).abs().max() <= 40000 * 2.0**-7


def job_gloo_on_cuda(rank):
    """Average a CUDA model over a Gloo group, through host memory."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    net = nn.Linear(300, 300).cuda()
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net, process_group=dist.new_group(backend="gloo"))
    with gradwire.attach(model, "fp32"):
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(5, 300, device="cuda")
            for module in (model, local):
                module.zero_grad()
                module(x).square().sum().backward()
            for p, q in zip(net.parameters(), local.parameters(), strict=True):
                assert torch.allclose(p.grad.cpu().double(), mean_of(q.grad), rtol=1e-5, atol=1e-6)


def check_kernels():
    """Compare the Triton kernels with the reference on the GPU: equal, except the means of `sign`."""
    seed = Seed(5, 0x9E3779B9)
    worst = 0.0
    for kind, block, stochastic, kept in itertools.product(
        ("int8", "int4", "sign", "fp8"), (32, 256), (False, True), (None, "float32", "bfloat16")
    ):
        if stochastic and (kind == "sign" or block == 32):
            continue
        form = BlockFormat(kind, block, stochastic)
        for n in (1, 31, 5003, 100_001):
            torch.manual_seed(n)
            values = torch.randn(n, device="cuda") * torch.randn(n, device="cuda").exp()
            values[n // 3] = math.inf if n % 2 else 0.0
            residual = None if kept is None else (torch.randn(n, device="cuda") / 10).to(getattr(torch, kept))
            rows = torch.zeros(3, -(-form.row_bytes(n) // 64) * 64, dtype=torch.uint8, device="cuda")
            for r in range(3):
                reference_blocks.encode(form, Chunk(torch.randn(n, device="cuda"), rows[r], None, seed))
            results = []
            for kernels in (reference_blocks, cuda_blocks):
                row = torch.zeros(form.row_bytes(n), dtype=torch.uint8, device="cuda")
                own_row = row.clone()
                own, decoded = values.clone(), torch.empty(n, device="cuda")
                held = None if residual is None else residual.clone()
                kernels.encode(form, Chunk(values, row, held, seed))
                kernels.decode(form, row, decoded)
                kernels.reduce(form, Chunk(own, own_row, held, seed), rows, 1, 1 / 3)
                total = torch.empty(n, device="cuda")
                kernels.sum_rows(form, total, rows, NO_RANK, 1 / 3)
                results.append([t for t in (decoded, own, held, total) if t is not None])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a.isnan(), b.isnan()), form
                difference = (a.double() - b.double()).nan_to_num(0).abs().max()
                relative = float(difference / a.double().nan_to_num(0).abs().max().clamp(min=1e-30))
                assert relative <= (2.0**-7 if kind == "sign" else 0.0), (form, n, relative)
                worst = max(worst, relative)
    return f"largest difference {worst:.1e}"


def check_cast_kernel():
    """Compare the Triton kernel that sums casts with the reference on the GPU, bit for bit."""
    for dtype, own_dtype, on_device in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16), (False, True)
    ):
        for n in (1, 1023, 100_001):
            torch.manual_seed(n)
            values = torch.randn(n, device="cuda").to(own_dtype)
            rows = torch.randn(3, -(-n // 64) * 64, device="cuda").to(dtype).view(torch.uint8)
            scales = [torch.tensor(1 / 3, device="cuda") if on_device else 1 / 3] * 3
            results = []
            for kernels in (reference_casts, cuda_casts):
                own, encoded = values.clone(), torch.zeros(n, dtype=dtype, device="cuda")
                kernels.reduce_rows(Terms(own, 1, rows, scales), encoded, 4.0, 0.25)
                in_place = values.to(dtype, copy=True)
                kernels.reduce_rows(Terms(in_place, 1, rows, scales), in_place, 1.0, 1.0)
                total = torch.empty_like(values)
                kernels.sum_rows(Terms(total, NO_RANK, rows, scales), dtype)
                results.append(torch.cat([t.view(torch.uint8) for t in (own, encoded, in_place, total)]))
            assert torch.equal(*results), (dtype, own_dtype, on_device, n)


def main():
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    num_failed = num_passed = 0
    only = tuple(sys.argv[1:])  # beginnings of names
    checks = {
        **{
            f"matrix {row.spec}": lambda row=row: check_hook(
                row.spec, world_size=min(row.world_sizes), device="cuda", cases=cases(), **row.in_training
            )
            for row in ROWS
        },
        "matrix torch's allreduce_hook through attach": lambda: check_hook(
            torch_hooks.allreduce_hook, tolerance=1e-6, device="cuda", via="attach"
        ),
        "kernels": check_kernels,
        "kernel of casts": check_cast_kernel,
        **rotated.CHECKS,
        "streams": lambda: run_ranks(job_streams, 2, timeout=120),
        "errors": lambda: run_ranks(job_errors, 2, timeout=120),
        "sparse and raw hooks": lambda: run_ranks(job_sparse_and_raw, 2, timeout=120),
        "Gloo on CUDA": lambda: run_ranks(job_gloo_on_cuda, 2, timeout=120),
        **face.CHECKS,
        **lowrank.CHECKS,
        **trust.CHECKS,
        **telemetry.CHECKS,
        **resume.CHECKS,
        **faults.CHECKS,
        **averager.CHECKS,
        **outer.CHECKS,
        **sharded.CHECKS,
        **shared.CHECKS,
        **auto.CHECKS,
        **recordings.CHECKS,
        **virtual.CHECKS,
    }
    for name, check in checks.items():
        if only and not name.startswith(only):
            continue
        begin = time.perf_counter()
        try:
            result = check()
            assert getattr(result, "ok", True), result
        except Exception:
            num_failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            num_passed += 1
            said = result if isinstance(result, str | list) else ""
            print(f"ok     {name} ({time.perf_counter() - begin:.1f} s) {said}", flush=True)
    print(f"{num_passed} passed, {num_failed} failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
