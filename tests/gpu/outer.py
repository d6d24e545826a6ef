"""A DiLoCo that streams over two NCCL ranks."""

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.testing import run_ranks
from tests.gpu.face import assert_same_on_all_ranks, flat, loss_of, model_of, nccl_group, net_of

STREAMING = gradwire.DiLoCo(fragments=2, delay=2, alpha=0.5)
BOUNDS = {"fp32": 1e-5, "int8": 2.0**-6, "int4": 0.2}
"""The largest difference to the plain loop, relative to the largest parameter."""


def plain_loop(rank, num_steps, period):
    """Run the same loop with exact means and no overlap; return the parameters."""
    model = net_of()
    named = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in named.items()}
    momentum = {name: torch.zeros_like(p) for name, p in named.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fragments = STREAMING.divide({name: p.numel() for name, p in named.items()})
    under_way = {}
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        loss_of(model, rank, step - 1).backward()
        optimizer.step()
        with torch.no_grad():
            for number, own in enumerate(fragments):
                for name in own if step % period == number * period // len(fragments) else ():
                    moved = (start[name] - named[name]).cpu().double()
                    dist.all_reduce(moved)
                    under_way[name] = step + STREAMING.delay, (moved / 2).float().cuda()
            for name in [name for name, (end, _) in under_way.items() if end == step]:
                mean = under_way.pop(name)[1]
                momentum[name].mul_(STREAMING.momentum).add_(mean)
                start[name] -= STREAMING.lr * (mean + STREAMING.momentum * momentum[name])
                named[name].lerp_(start[name], 1 - STREAMING.alpha)
    return flat(model)


def train(rank, group, num_steps, **options):
    model = model_of(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.LocalSGD(model, optimizer, outer=STREAMING, **options) as local:
        for step in range(num_steps):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            local.step()
        trained = flat(model)
        saved = {name: tensor.cpu().clone() for name, tensor in local.state_dict()["start"].items()}
        local.average()
        assert_same_on_all_ranks(model)
    return trained, saved


def job_streaming(rank):
    """Parameters are those of the plain loop; in host memory, the same bits."""
    group = nccl_group(rank)
    expected = plain_loop(rank, 14, 4)
    for recipe, bound in BOUNDS.items():
        trained, start = train(rank, group, 14, period=4, recipe=recipe)
        error = (trained - expected).abs().max() / expected.abs().max()
        assert error <= bound, (recipe, float(error))
        offloaded, offloaded_start = train(rank, group, 14, period=4, recipe=recipe, offload=True)
        assert torch.equal(trained, offloaded), recipe
        assert all(torch.equal(start[name], offloaded_start[name]) for name in start)
    gloo = dist.new_group(backend="gloo")  # CUDA parameters through host memory
    trained, _ = train(rank, gloo, 14, period=4, recipe="fp32")
    assert (trained - expected).abs().max() <= 1e-5 * expected.abs().max()


def job_no_host_wait(rank):
    """The host goes on while the device still has work from before the averaging."""
    group = nccl_group(rank)
    net = nn.Linear(512, 512).cuda()
    model = nn.parallel.DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = gradwire.DiLoCo(delay=1)
    for offload in (False, True):
        with gradwire.LocalSGD(
            model, optimizer, period=2, recipe="int4", outer=outer, offload=offload
        ) as local:
            for _ in range(5):  # compiles kernels, and compares layouts
                local.step()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(2_000_000_000)  # about a second
            ended = [local.step() for _ in range(2)]
            busy = not torch.cuda.current_stream().query()
            torch.cuda.synchronize()
            assert ended == [False, True], ended
            assert busy, f"offload={offload}: the host waited for the device"


def job_not_finite(rank):
    """An average that is not finite moves nothing, and is an error when the next one begins."""
    group = nccl_group(rank)
    for offload in (False, True):
        model = model_of(group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"period": 4, "outer": gradwire.DiLoCo(), "recipe": "int4", "offload": offload}
        with gradwire.LocalSGD(model, optimizer, **options) as local:
            for _ in range(3):
                local.step()
            before, parameters = local.state_dict(), flat(model).clone()
            if rank == 1:
                with torch.no_grad():
                    parameter = next(model.parameters())
                    parameter[(0,) * parameter.dim()] = float("nan")
            assert local.step()
            after = local.state_dict()
            for kind in ("start", "momentum"):
                assert all(torch.equal(values, after[kind][name]) for name, values in before[kind].items())
            assert int((flat(model) != parameters).sum()) == rank
            try:
                for _ in range(4):
                    local.step()
            except gradwire.WireError as error:
                assert "the last average is not finite, so it has changed nothing" in str(error), error
            else:
                raise AssertionError("no error was raised")


CHECKS = {
    "streaming DiLoCo": lambda: run_ranks(job_streaming, 2, timeout=180),
    "an average that is not finite": lambda: run_ranks(job_not_finite, 2, timeout=120),
    "streaming without a wait": lambda: run_ranks(job_no_host_wait, 2, timeout=120),
}
