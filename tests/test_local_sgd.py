"""Local SGD, in torch's two halves and in one piece."""

import copy
import io
import os
import pickle
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_module
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from gradwire.testing import check_hook, run_ranks
from gradwire.training import local_sgd as loop
from tests.local_runs import assert_same_on_all_ranks, flat, loss_of, net
from tests.models import small_model
from tests.sizes import usually
from tests.threads import lasting_threads


def mean_over_ranks(model):
    total = flat(model).double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).float()


# --- torch's two halves ---


def job_post_local(rank):
    """Averaged in the world for two steps, then in each half alone, then not at all."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for with_subgroup in (True, False):
        local = copy.deepcopy(net())
        model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
        state = PostLocalSGDState(None, halves[rank // 2], 2, post_local_gradient_allreduce=with_subgroup)
        assert isinstance(state, torch_module.PostLocalSGDState), "what Lightning asks"
        model.register_comm_hook(state, post_localSGD_hook)
        for step in range(4):
            for module in (model, local):
                module.zero_grad()
                loss_of(module, rank, step).backward()
            for p, q in zip(model.module.parameters(), local.parameters(), strict=True):
                expected = q.grad.clone()
                if step < 2:
                    dist.all_reduce(expected)
                    expected /= 4
                elif with_subgroup:
                    dist.all_reduce(expected, group=halves[rank // 2])
                    expected /= 2
                torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-8)
        assert state.iter == 2


def test_post_local_sgd_averages_globally_then_in_the_subgroup():
    run_ranks(job_post_local, 4)


def job_machines(rank):
    """Without a subgroup, ranks that run on one machine form one; here two machines of two ranks."""
    machine = rank // 2
    socket.gethostname = lambda: f"machine{machine}"
    model = small_model()
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=0)
    with gradwire.attach(model, post_localSGD_hook, state=state):
        model(torch.full((1, 10), float(rank))).sum().backward()
    assert dist.get_process_group_ranks(state.subgroup) == [2 * machine, 2 * machine + 1]
    dist.new_group([0, 1, 2, 3])  # world-wide calls still meet
    dist.barrier()


def test_without_a_subgroup_the_ranks_of_a_machine_form_one():
    run_ranks(job_machines, 4)


def averaging_within_the_group(group):
    return PostLocalSGDState(group, group, start_localSGD_iter=2)


def test_post_local_sgd_keeps_the_contract():
    report = check_hook(
        post_localSGD_hook, averaging_within_the_group, tolerance=1e-6, world_size=3, num_roundings=1
    )
    assert report.ok, report


def train_with_torchs_halves(rank, state_class, hook, averager):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    subgroup = dist.new_group([rank], use_local_synchronization=True)
    model.register_comm_hook(state_class(None, subgroup, 3), hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager())
    for step in range(9):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return flat(model)


def job_averagers(rank):
    size = dist.get_world_size()
    makers = {
        "periodic": lambda: PeriodicModelAverager(period=2, warmup_steps=3),
        "hierarchical": lambda: HierarchicalModelAverager({2: 2, 4: size}, warmup_steps=3),
    }
    for name, averager in makers.items():
        ours = train_with_torchs_halves(rank, PostLocalSGDState, post_localSGD_hook, averager)
        theirs = train_with_torchs_halves(
            rank, torch_module.PostLocalSGDState, torch_module.post_localSGD_hook, averager
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=name)


def test_torchs_averagers_and_optimizer_work_with_it_as_with_torchs_own():
    run_ranks(job_averagers, 4)


def job_pickling(rank):
    state = PostLocalSGDState(dist.group.WORLD, dist.new_group(), 7, post_local_gradient_allreduce=False)
    state.iter = 5
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    for restored in (pickle.loads(pickle.dumps(state)), torch.load(saved)):
        assert isinstance(restored, PostLocalSGDState)
        assert (restored.iter, restored.start_localSGD_iter) == (5, 7)
        assert restored.post_local_gradient_allreduce is False
        assert restored.process_group is None
        assert restored.subgroup is None
        model = small_model()
        model.register_comm_hook(restored, post_localSGD_hook)
        model(torch.ones(1, 10)).sum().backward()
        assert restored.iter == 6


def test_a_state_pickles_without_its_groups_and_goes_on():
    run_ranks(job_pickling, 2)


# --- in one piece, against the plain loop ---


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


def job_checkpoint(rank):
    def make():
        model = DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer

    def options():
        return {
            "period": 3,
            "warmup_steps": 2,
            "recipe": "int4",  # has residuals to go on with
            "outer": gradwire.SlowMo(),
        }

    def train(model, optimizer, local, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            local.step()

    for saved_after in (1, 5, 6):  # in the warm-up, at an averaging, between two
        model, optimizer = make()
        with gradwire.LocalSGD(model, optimizer, **options()) as local:
            train(model, optimizer, local, range(saved_after))
            saved = io.BytesIO()
            torch.save([model.module.state_dict(), optimizer.state_dict(), local.state_dict()], saved)
            train(model, optimizer, local, range(saved_after, 11))
        saved.seek(0)
        weights, optimizer_state, local_state = torch.load(saved, weights_only=True)
        resumed, resumed_optimizer = make()
        resumed.module.load_state_dict(weights)
        resumed_optimizer.load_state_dict(optimizer_state)
        with gradwire.LocalSGD(resumed, resumed_optimizer, **options()) as local:
            # Making it has set all ranks to one start; each rank has a place of its own.
            resumed.module.load_state_dict(weights)
            local.load_state_dict(local_state)
            train(resumed, resumed_optimizer, local, range(saved_after, 11))
        assert torch.equal(flat(model), flat(resumed)), saved_after

    other = DistributedDataParallel(nn.Linear(3, 3))
    with (
        gradwire.LocalSGD(other, torch.optim.SGD(other.parameters(), lr=0.1), period=2) as local,
        pytest.raises(ValueError, match="does not fit: it differs in"),
    ):
        local.load_state_dict(local_state)


def test_a_checkpoint_goes_on_bit_for_bit():
    run_ranks(job_checkpoint, 2)


def trained_for(num_steps, group=None, recipe="int4", rank=0):
    model = DistributedDataParallel(net(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = gradwire.LocalSGD(
        model, optimizer, period=2, warmup_steps=2, recipe=recipe, outer=gradwire.DiLoCo()
    )
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        local.step()
    return local


def figures(local):
    """All that a load may change."""
    state = local.state_dict()
    kept = {key: dict(state[key]) for key in ("start", "momentum")}
    return (
        state["num_steps"],
        kept,
        local._wire,
        local._wire.attached,
        str(local._wire.recipe),
        state["wire"]["step"],
    )


def same(one, other):
    parts = [(one[1][key], other[1][key]) for key in one[1]]
    tensors = all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in parts)
    return tensors and (one[0], *one[2:]) == (other[0], *other[2:])


def job_bad_states(rank):
    """A state that does not fit on one rank is loaded on none."""
    donor = trained_for(4, rank=rank)
    good = donor.state_dict()
    donor.detach()
    for num_steps in (0, 4):  # with another wire than the state's, and with the same
        local = trained_for(num_steps, rank=rank)
        before = figures(local)

        def part(key, **changes):
            return {**good, key: {**good[key], **changes}}

        for bad, text in (
            ({}, "no state of a LocalSGD: it has no 'num_steps'"),
            (part("averaging", version=1), "version 1"),
            (part("averaging", memory={}), "has no 'rank1'"),
            (part("wire", version=1), "version 1"),
            (part("wire", layouts=[[0, [["float32", ["no such"]]]]]), "a parameter 'no such'"),
            (part("start", **{"0.bias": torch.zeros(1)}), "differs in .'0.bias'"),
            ({**good, "num_steps": "many"}, "many"),
        ):
            with pytest.raises(ValueError, match=text) as caught:
                local.load_state_dict(bad if rank else good)
            assert rank or "LocalSGD.load_state_dict failed on rank 1" in str(caught.value)
            assert same(before, figures(local)), text
        with pytest.raises(ValueError, match="the saved step is 4 on"):
            local.load_state_dict({**good, "num_steps": 4 + rank})
        assert same(before, figures(local))
        local.load_state_dict(good)
        assert local.num_steps == 4
        local.detach()


def job_fewer_ranks(rank):
    """Saved on two ranks, loaded on one; each rank for itself."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for recipe, num_steps, part in (("bf16", 5, None), ("int4", 5, "averaging"), ("int4", 1, "wire")):
        local = trained_for(num_steps, recipe=recipe, rank=rank)
        state = local.state_dict()
        local.detach()
        everyone = [None, None]
        dist.all_gather_object(everyone, state)
        resumed = trained_for(0, group=alone, recipe=recipe)
        if part is not None:
            with pytest.raises(ValueError, match=f"merge_state_dicts of every rank's {part!r}"):
                resumed.load_state_dict(state)
            state[part] = gradwire.merge_state_dicts([each[part] for each in everyone])
        resumed.load_state_dict(state)
        assert resumed.num_steps == num_steps
        assert all(torch.equal(v, state["start"][n]) for n, v in resumed.state_dict()["start"].items())
        resumed.detach()


def job_nothing_left(rank):
    """A run that cannot begin leaves the model as it was; with GRADWIRE_DISABLE nothing is opened."""

    def fail(*args, **options):
        raise OSError("no more sockets")

    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("open_engine", "make_fragments"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no more sockets"):
            patch.setattr(loop, name, fail)
            gradwire.LocalSGD(model, optimizer, period=1)
        assert not lasting_threads()
    os.environ["GRADWIRE_DISABLE"] = "1"
    with gradwire.LocalSGD(model, optimizer, period=1) as local:
        assert not lasting_threads()
        loss_of(model, rank, 0).backward()
        assert not local.step()
        local.average()
        local.load_state_dict(local.state_dict())
        assert (local.num_steps, local.stats().num_steps) == (1, 0)
    del os.environ["GRADWIRE_DISABLE"]
    with gradwire.attach(model, "fp32"):
        loss_of(model, rank, 0).backward()


def job_states(rank):
    job_bad_states(rank)
    job_fewer_ranks(rank)
    job_nothing_left(rank)


def test_a_state_is_loaded_on_all_ranks_or_on_none_and_what_fails_leaves_nothing():
    run_ranks(job_states, 2)


def job_refusals(rank):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, text in (
        ({"period": 0}, "period must be at least 1"),
        ({"period": 2, "warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"period": 2, "recipe": "noop"}, "needs a recipe that averages, and noop does not"),
        ({"period": 2, "recipe": "fp32:reduction=sum"}, "needs a recipe that averages"),
        ({"period": 2 + rank}, "ranks call gradwire.LocalSGD with different things"),
    ):
        with pytest.raises(ValueError, match=text):
            gradwire.LocalSGD(model, optimizer, **options)
    with pytest.raises(ValueError, match="holds no parameter of the model"):
        gradwire.LocalSGD(model, torch.optim.SGD(net().parameters(), lr=0.1), period=2)
    with pytest.raises((ValueError, RuntimeError), match="period must be at least 1"):
        gradwire.LocalSGD(model, optimizer, period=rank)
    for wrong in (1.0, -0.1):
        with pytest.raises(ValueError, match="momentum must be"):
            gradwire.SlowMo(momentum=wrong)
    with pytest.raises(ValueError, match="lr must be more than 0"):
        gradwire.DiLoCo(lr=0)

    local = gradwire.LocalSGD(model, optimizer, period=1)
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


def test_what_does_not_fit_is_refused_and_a_failed_averaging_raises():
    run_ranks(job_refusals, 2)
