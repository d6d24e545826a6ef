"""Sharded models over two NCCL ranks: reduce-scatter by recipe, averages over replicas, and no host waits."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire.testing import run_ranks

# The largest error, relative to the largest gradient of any rank.
SIZES = (1, torch.float32), (70_001, torch.float32), (70_002, torch.float32), (4096, torch.bfloat16)
BOUNDS = {"fp32": 1e-5, "bf16": 2**-7, "int8": 0.01, "int4": 0.09, "sign": 3.0, "sign:rotated=false": 1.0}


def prepare(rank):
    os.environ["NCCL_HOSTID"] = str(rank)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return dist.new_group(backend="nccl")


def mesh_of(group, num_replicas, num_shards):
    """Return a mesh of two dimensions, one of which has all ranks; the world itself is a Gloo group."""
    alone = [dist.new_group([each], backend="nccl") for each in range(2)][group.rank()]
    groups = [alone, group] if num_replicas == 1 else [group, alone]
    ranks = torch.arange(2).view(num_replicas, num_shards)
    return DeviceMesh.from_group(groups, "cuda", mesh=ranks, mesh_dim_names=("replicate", "shard"))


def build(width=64):
    torch.manual_seed(0)
    layers = [(nn.Linear(width, width + 1), nn.Tanh(), nn.Linear(width + 1, width)) for _ in range(3)]
    return nn.Sequential(*(nn.Sequential(*each) for each in layers)).cuda()


def shard(model, mesh, **options):
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(rank, step, width=64):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(32, width, generator=generator).cuda()


def exact(step, num_ranks=2):
    """Return the mean gradients, and the largest gradient of any rank."""
    model, largest, total = build(), 0.0, {}
    for rank in range(num_ranks):
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        for name, p in model.named_parameters():
            total[name] = total.get(name, 0) + p.grad / num_ranks
            largest = max(largest, float(p.grad.abs().max()))
    return total, largest


def require_near(model, step, bound):
    want, largest = exact(step)
    for name, p in model.named_parameters():
        error = float((p.grad.full_tensor() - want[name]).abs().max())
        assert error <= bound * largest, (name, error, largest)


def job_scatter(rank):
    """Chunks of means are right, for lengths that no number divides."""
    group = prepare(rank)
    for spec, bound in BOUNDS.items():
        with gradwire.Averager(spec, group) as averager:
            for numel, dtype in SIZES:
                draws = []
                for each in range(2):
                    torch.manual_seed(each)
                    draws.append(torch.randn(numel, device="cuda").to(dtype))
                want = (draws[0].double() + draws[1].double()) / 2
                largest = max(float(d.abs().max()) for d in draws)
                part = averager.reduce_scatter(draws[rank])
                start, end = numel * rank // 2, numel * (rank + 1) // 2
                if end > start:
                    error = float((part.double() - want[start:end]).abs().max())
                    rounding = 2**-7 if dtype == torch.bfloat16 else 0
                    assert error <= (bound + rounding) * largest, (spec, numel, error)
                whole = averager.all_gather(part, numel=numel)
                mine = whole.double().cpu()
                others = [torch.empty_like(mine) for _ in range(2)]
                dist.all_gather(others, mine)
                assert torch.equal(*others), (spec, numel)


def job_fsdp(rank):
    """Gradients are within the recipe's bound, also with mixed precision and accumulation."""
    mesh = mesh_of(prepare(rank), 1, 2)["shard"]
    for spec, bound in BOUNDS.items():
        model = shard(build(), mesh)
        with gradwire.attach(model, spec) as wire:
            for step in range(3):
                model.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                require_near(model, step, bound)
            assert wire.stats().num_steps == 3
        model.zero_grad()
        model(batch(rank, 0)).square().mean().backward()
        require_near(model, 0, 1e-5)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(build(), mesh, mp_policy=policy)
    with gradwire.attach(model, "int8"):
        model(batch(rank, 0)).square().mean().backward()
        require_near(model, 0, 0.1)
    model = shard(build(), mesh)
    with gradwire.attach(model, "fp32"):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            (model(batch(rank, 0)).square().mean() / 2).backward()
        require_near(model, 0, 1e-5)


def job_auto(rank):
    """Both ranks choose alike, and gradients keep the budget."""
    mesh = mesh_of(prepare(rank), 1, 2)["shard"]
    model = shard(build(), mesh)
    with gradwire.attach(model, "auto:budget=0.15") as wire:
        for step in range(70):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
        told = [None, None]
        dist.all_gather_object(told, wire.decisions())
        assert told[0] == told[1] != ()
        assert all(each.step_ms >= each.exposed_ms > 0 for each in wire.decisions())
        assert all(each.error <= 0.15 for each in wire.decisions())
        want, _ = exact(69)
        have = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found, whole = (torch.cat([each[name].flatten() for name in want]) for each in (have, want))
        assert 0 < (found - whole).norm() < 0.15 * whole.norm()


def job_hsdp(rank):
    """Replicas are averaged by any recipe, natively sharded or not, and end with the same bits."""
    mesh = mesh_of(prepare(rank), 2, 1)
    for spec, bound in {**BOUNDS, "powersgd:rank=8": 1.5}.items():
        for native in (True, False):
            model = shard(build(), mesh if native else mesh["shard"])
            more = {} if native else {"replicas": mesh["replicate"]}
            with gradwire.attach(model, spec, **more) as wire:
                for step in range(2):
                    model.zero_grad()
                    for is_last in (False, True):
                        model.set_requires_all_reduce(is_last)
                        (model(batch(rank, step)).square().mean() / 2).backward()
                    if step == 0:
                        require_near(model, step, 2 * bound)
                    mine = torch.cat([p.grad.to_local().flatten() for p in model.parameters()]).cpu()
                    others = [torch.empty_like(mine) for _ in range(2)]
                    dist.all_gather(others, mine)
                    assert torch.equal(*others), (spec, native, step)
                assert wire.stats().num_steps == 2


def job_host(rank):
    """The host enqueues a backward pass, and does not wait for the device."""
    mesh = mesh_of(prepare(rank), 1, 2)["shard"]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).cuda()
    shard(model, mesh)
    x = torch.randn(16384, 4096, device="cuda")
    with gradwire.attach(model, "int8"):
        for step in range(4):
            loss = model(x).square().mean()
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            loss.backward()
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            device = time.perf_counter() - begin
            if step:
                print(f"rank {rank}: host {1e3 * host:.1f} ms, device {1e3 * device:.1f} ms")
        assert host < 0.7 * device, (host, device)


def job_queue(rank):
    """Every call returns while a kernel that was queued before it still runs: the host never waits."""
    group = prepare(rank)
    mesh = mesh_of(group, 1, 2)["shard"]
    model = shard(build(256), mesh)
    x = batch(rank, 0, 256)
    flat = torch.randn(1 << 22, device="cuda")

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    def require_no_wait(what, call):
        for _ in range(3):
            call()  # allocates, compiles and connects
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(3_000_000_000)  # cycles: more than a second
        slept = torch.cuda.Event()
        slept.record()
        call()
        assert not slept.query(), f"{what}: the host has waited"
        torch.cuda.synchronize()

    for spec in ("fp32", "bf16", "int8", "int4"):
        with gradwire.Averager(spec, group) as averager:
            require_no_wait(f"reduce_scatter by {spec}", lambda: averager.reduce_scatter(flat))
    for spec, weights in (("int8", None), ("int4", "int8"), ("fp32", "bf16")):
        with gradwire.attach(model, spec, weights=weights):
            require_no_wait(f"a step with {spec}, {weights}", step)


def job_weights(rank):
    """All ranks compute with the same decoded weights, near those that the optimizer steps."""
    mesh = mesh_of(prepare(rank), 1, 2)["shard"]
    for spec, bound in (("bf16", 2**-8), ("int8", 1.01 / 254), ("int4", 1.01 / 14)):
        for dtype in (torch.float32, torch.bfloat16):
            model = shard(build(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            masters = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
            seen = {}
            layers = {f"{i}.{j}": model[i][j] for i in range(3) for j in (0, 2)}
            for name, layer in layers.items():
                layer.register_forward_hook(
                    lambda m, *_, name=name, seen=seen: seen.update({name: m.weight.detach().clone()})
                )
            with gradwire.attach(model, "int8", weights=spec):
                model(batch(rank, 0)).square().mean().backward()
            for name, weight in seen.items():
                master = masters[f"{name}.weight"]
                error = float((weight.float() - master).abs().max())
                assert error <= (bound + 2**-8) * float(master.abs().max()), (spec, dtype, name, error)
                others = [torch.empty_like(weight.float().cpu()) for _ in range(2)]
                dist.all_gather(others, weight.float().cpu())
                assert torch.equal(*others), (spec, dtype, name)


CHECKS = {
    f"sharded {job.__name__.removeprefix('job_')}": (lambda job=job: run_ranks(job, 2, timeout=180))
    for job in (job_scatter, job_queue, job_weights, job_host, job_fsdp, job_auto, job_hsdp)
}
