"""Local SGD, against the plain loop."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.testing import run_ranks
from tests.local_runs import assert_same_on_all_ranks, flat, loss_of, net
from tests.sizes import usually


def mean_over_ranks(model):
    total = flat(model).double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).float()


def plain_loop(rank, num_steps, period, outer, lr_of):
    """Local SGD as the papers write it, with nothing of ours."""
    model, start = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr_of(0), momentum=0.9)
    if isinstance(outer, gradwire.DiLoCo):
        outer_optimizer = torch.optim.SGD(
            start.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True
        )
    slow = [torch.zeros_like(p) for p in start.parameters()]
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = lr_of(step)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if (step + 1) % period:
            continue
        means = []
        for p in model.parameters():
            mean = p.detach().double()
            dist.all_reduce(mean)
            means.append((mean / dist.get_world_size()).float())
        with torch.no_grad():
            for i, (p, mean) in enumerate(zip(start.parameters(), means, strict=True)):
                if outer is None:
                    p.copy_(mean)
                elif isinstance(outer, gradwire.SlowMo):
                    slow[i] = outer.momentum * slow[i] + (p - mean) / lr_of(step)
                    p.sub_(outer.lr * lr_of(step) * slow[i])
                else:
                    p.grad = p - mean
        if isinstance(outer, gradwire.DiLoCo):
            outer_optimizer.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), start.parameters(), strict=True):
                p.copy_(q)
    return flat(model)


def local_loop(rank, num_steps, lr_of, recipe, **options):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr_of(0), momentum=0.9)
    averaged = []
    with gradwire.LocalSGD(model, optimizer, recipe=recipe, **options) as local:
        for step in range(num_steps):
            optimizer.param_groups[0]["lr"] = lr_of(step)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if local.step():
                averaged.append(step)
                assert_same_on_all_ranks(model)
    return flat(model), averaged


def falling(step):
    return 0.1 / (1 + step)


def job_parity(rank):
    for outer in (None, gradwire.SlowMo(momentum=0.6, lr=0.9), gradwire.DiLoCo()):
        expected = plain_loop(rank, 12, 3, outer, falling)
        # A rounding of the first averaging, up to 2^-10 or 2^-7 of a step, is carried through the others.
        for recipe, bound in (("fp32", 1e-6), ("fp16", 2.0**-10), ("bf16", 2.0**-7), ("int8", 2.0**-6)):
            ours, averaged = local_loop(rank, 12, falling, recipe, period=3, outer=outer)
            assert averaged == [2, 5, 8, 11]
            assert (ours - expected).abs().max() <= bound * expected.abs().max(), (outer, recipe)


@pytest.mark.parametrize("world_size", usually(2, otherwise=[4]))
def test_local_sgd_equals_the_plain_loop(world_size):
    run_ranks(job_parity, world_size)


def job_period_of_one(rank):
    """SGD without momentum is linear: averaging parameters each step is averaging gradients."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = DistributedDataParallel(net())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    local = gradwire.LocalSGD(model, optimizer, period=1)
    for step in range(5):
        for module, stepper in ((model, optimizer), (plain, plain_optimizer)):
            stepper.zero_grad()
            loss_of(module, rank, step).backward()
            stepper.step()
        assert local.step()
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-5, atol=1e-6)


def job_warm_up(rank):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = gradwire.LocalSGD(model, optimizer, period=2, warmup_steps=3)
    averaged, identical = [], []
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, gradient)
        identical.append(all(torch.equal(gradient, other) for other in everyone))
        optimizer.step()
        averaged.append(local.step())
    assert identical == [True] * 3 + [False] * 5
    assert averaged == [False] * 4 + [True, False, True, False]
    expected = mean_over_ranks(model)
    local.average()
    assert_same_on_all_ranks(model)
    torch.testing.assert_close(flat(model), expected, rtol=1e-5, atol=1e-6)
    sent = local.stats()
    assert sent.num_steps == 3
    assert sent.bytes_sent > 0
    local.detach()


def job_skipped_steps(rank):
    """A rank whose scaler skips steps goes on counting them."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    local = gradwire.LocalSGD(model, optimizer, period=3)
    for step in range(9):
        before = flat(model)
        optimizer.zero_grad()
        factor = float("inf") if rank == 1 and step in (1, 2, 4) else 1.0
        scaler.scale(loss_of(model, rank, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped = torch.equal(before, flat(model))
        assert skipped == (factor != 1.0)
        if local.step():
            assert_same_on_all_ranks(model)
            assert flat(model).isfinite().all()
    assert local.num_steps == 9
    assert local.stats().num_steps == 3


def job_bf16_parameters(rank):
    """The average is kept in fp32 beside parameters that are narrower."""
    model = DistributedDataParallel(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16))
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    local = gradwire.LocalSGD(model, optimizer, period=1)
    for _ in range(4):
        # Rank 0 goes one last place of bf16 down, the others stay: the mean is between the two.
        model.module.weight.grad = torch.full((8, 8), 2.0**-8 if rank == 0 else 0.0, dtype=torch.bfloat16)
        optimizer.step()
        local.step()
    expected = 1.0 - 4 * 2.0**-8 / dist.get_world_size()
    assert local.state_dict()["start"]["weight"].unique().tolist() == [expected]
    assert_same_on_all_ranks(model.float())


def job_together(rank):
    job_period_of_one(rank)
    job_warm_up(rank)
    job_skipped_steps(rank)
    job_bf16_parameters(rank)


@pytest.mark.parametrize("world_size", usually(2, otherwise=[4]))
def test_periods_warm_up_skipped_steps_and_narrow_parameters(world_size):
    run_ranks(job_together, world_size)


def job_refusals(rank):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, text in (
        ({"period": 0}, "period must be at least 1"),
        ({"period": 2, "warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"period": 2, "recipe": "noop"}, "needs a recipe that averages, and noop does not"),
        ({"period": 2, "recipe": "fp32:reduction=sum"}, "needs a recipe that averages"),
        ({"period": 2, "recipe": "topk:momentum=0.9"}, "give the momentum to outer="),
        ({"period": 2 + rank}, "ranks call gradwire.LocalSGD with different things"),
    ):
        with pytest.raises(ValueError, match=text):
            gradwire.LocalSGD(model, optimizer, **options)
    with pytest.raises(ValueError, match="holds no parameter of the model"):
        gradwire.LocalSGD(model, torch.optim.SGD(net().parameters(), lr=0.1), period=2)
    with pytest.raises(TypeError, match="optimizer is a torch.optim.Optimizer, not str"):
        gradwire.LocalSGD(model, "sgd", period=2)
    with pytest.raises((ValueError, RuntimeError), match="period must be at least 1"):
        gradwire.LocalSGD(model, optimizer, period=rank)
    for wrong in (1.0, -0.1):
        with pytest.raises(ValueError, match="momentum must be"):
            gradwire.SlowMo(momentum=wrong)
    with pytest.raises(ValueError, match="lr must be more than 0"):
        gradwire.DiLoCo(lr=0)

    local = gradwire.LocalSGD(model, optimizer, period=1)
    assert repr(local) == "<LocalSGD fp32, period 1, 0 steps>"
    frozen = next(model.module.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="parameters have changed since local SGD began"):
        local.step()
    frozen.requires_grad_(True)
    before = flat(model)
    if rank == 1:
        local.detach()
    else:
        with pytest.raises(gradwire.WireError, match="rank 0, step 2, bucket 0, hook fp32"):
            local.step()
        assert torch.equal(before, flat(model)), "a failed averaging leaves parameters as they were"


@pytest.mark.parametrize("name", ["momentum", "lr", "alpha"])
def test_an_outer_optimizer_takes_numbers(name):
    with pytest.raises(TypeError, match=f"{name} must be a number, not '0.9'"):
        gradwire.DiLoCo(**{name: "0.9"})


def test_what_does_not_fit_is_refused_and_a_failed_averaging_raises():
    run_ranks(job_refusals, 2)
