"""Errors that tell a user what to do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import gradwire
from gradwire.ddp import unwrap
from gradwire.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from gradwire.testing import Case, check_hook
from tests.models import backward, gradients, small_model

# --- models ---


def check_models(rank):
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    alone, device = "train without gradwire", torch.device("cpu")
    others = {
        DataParallel(nn.Linear(2, 2)): ("DataParallel", alone),
        FullyShardedDataParallel(nn.Linear(2, 2), device_id=device): (
            r"FullyShardedDataParallel \(FSDP\)",
            r"shard it with fully_shard \(FSDP2\)",
        ),
        replicate(nn.Linear(2, 2)): (r"replicate\(\)", alone),
    }
    for model, (name, other) in others.items():
        text = f"averaged by {name}.*does not support. Wrap the plain model .* instead, or {other}$"
        with pytest.raises(TypeError, match=text):
            gradwire.attach(model, "int4")
    sharded = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(
        TypeError, match=r"averaged by fully_shard\(\) \(FSDP2\), which gradwire.attach takes"
    ):
        register_ddp_comm_hook(DDPCommHookType.INT8, sharded)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"not Linear: this is the .module of one; attach to the Distributed"):
        gradwire.attach(ddp.module, "int4")
    with pytest.raises(TypeError, match="not Linear; wrap the model first, in torch.nn.parallel.Distributed"):
        gradwire.attach(nn.Linear(2, 2), "int4")


def test_a_model_of_another_kind_is_refused_with_what_to_wrap_instead(two_ranks):
    two_ranks.run(check_models)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="takes a DistributedDataParallel, not str$"):
        unwrap("model")


# --- recipes ---


@pytest.mark.parametrize("text", ["topn", "nop", "none", "no", "top", "loop", "noob", "zoop", "random"])
def test_no_slip_of_the_pen_suggests_not_to_average(text):
    with pytest.raises(ValueError, match=r"there is no recipe|Recipes:") as caught:
        gradwire.recipe(text)
    assert (
        "did you mean" not in str(caught.value) or "'noop'" not in str(caught.value).partition("Recipes:")[0]
    )


@pytest.mark.parametrize("text", ["int4,feedback=false", "int4;feedback=false", "int4, feedback=false"])
def test_options_after_another_sign_are_suggested_after_a_colon(text):
    with pytest.raises(ValueError, match="did you mean 'int4:feedback=false'"):
        gradwire.recipe(text)


# --- hooks that are there already ---


def check_after_local_sgd(rank):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for warmup_steps in (0, 2):
        with gradwire.LocalSGD(model, optimizer, period=2, warmup_steps=warmup_steps) as local:
            for _ in range(4):
                with pytest.raises(
                    ValueError, match=r"a gradwire.LocalSGD trains this model .* detach\(\) on it"
                ):
                    gradwire.attach(model, "int8")
                backward(model)
                optimizer.step()
                local.step()
    with (
        gradwire.attach(model, "int8"),
        pytest.raises(ValueError, match="int8 is attached to this model already"),
    ):
        gradwire.attach(model, "int4")


def test_attach_names_the_local_sgd_that_has_the_model(two_ranks):
    two_ranks.run(check_after_local_sgd)


def check_second_registration(rank):
    for first in (DDPCommHookType.BF16_COMPRESS, DDPCommHookType.INT4, DDPCommHookType.POWER_SGD):
        model = small_model()
        register_ddp_comm_hook(first, model)
        for second in (DDPCommHookType.ALLREDUCE, DDPCommHookType.POWER_SGD_RANK2):
            with pytest.raises(RuntimeError, match="can only be called once"):
                register_ddp_comm_hook(second, model)
    model = small_model()
    model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(RuntimeError, match="can only be called once"):
        register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model)


def test_a_second_registration_raises_what_torch_raises(two_ranks):
    two_ranks.run(check_second_registration)


def check_low_rank_members(rank):
    names = ("POWER_SGD", "POWER_SGD_RANK2", "BATCHED_POWER_SGD", "BATCHED_POWER_SGD_RANK2")
    for name in names:
        plain, other = small_model(), small_model()
        DDPCommHookType[name].value(model=other, state=None, start_powerSGD_iter=2)
        for step in range(4):
            backward(plain, step)
            backward(other, step)
            is_exact = torch.allclose(gradients(plain), gradients(other), rtol=1e-5, atol=1e-7)
            assert is_exact == (step < 2), (name, step)


def test_every_low_rank_member_takes_the_step_at_which_it_starts(two_ranks):
    two_ranks.run(check_low_rank_members)


def list_itself(state, bucket):
    return [bucket.buffer()]


def future_of_list(state, bucket):
    future = torch.futures.Future()
    future.set_result([bucket.buffer()])
    return future


def future_of_torchs_list(state, bucket):
    return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()


@pytest.mark.parametrize("hook", [list_itself, future_of_list, future_of_torchs_list])
def test_check_hook_says_how_to_see_what_a_hook_has_returned(hook):
    for via, text in (("ddp", "via='attach' says"), ("attach", "list")):
        report = check_hook(hook, via=via, cases=[Case()])
        assert not report.ok
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(str(report))


# --- overlapped optimizers ---


def check_factories(rank):
    model = small_model()
    with gradwire.attach(model, "fp32") as wire:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            TypeError, match=r"function that makes .* \(SGD\): pass lambda params: torch.optim.SGD"
        ):
            gradwire.overlap_optimizer(wire, optimizer)
        with pytest.raises(TypeError, match="a function that makes the optimizer from a list .* not float"):
            gradwire.overlap_optimizer(wire, 0.1)


def test_an_optimizer_instead_of_a_function_that_makes_one_is_refused(two_ranks):
    two_ranks.run(check_factories)


def check_missed_steps(rank, skips_on):
    model = small_model()
    wire = gradwire.attach(model, "fp32")
    optimizer = gradwire.overlap_optimizer(wire, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in range(3):
        with model.no_sync():
            model(torch.ones(4, 10)).sum().backward()
        backward(model, step)
        optimizer.step()
        optimizer.step()
    backward(model)
    if rank not in skips_on:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(gradwire.WireError, match=r"backward\(\) runs again before optimizer.step\(\)"):
        for _ in range(3):  # a rank where all went well may learn of it one step later
            backward(model)
            optimizer.step()
    wire.detach()


@pytest.mark.parametrize("skips_on", [(0, 1), (1,)])
def test_a_second_backward_without_a_step_between_is_refused(skips_on, two_ranks):
    two_ranks.run(check_missed_steps, skips_on)
