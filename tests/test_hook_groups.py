"""The ranks that hooks of the drop-in average over: the model's group, or the world."""

import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

import gradwire
from gradwire.ddp_comm_hooks import (
    DDPCommHookType,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from gradwire.testing import run_ranks
from tests.models import backward, gradients, small_model


class NoStep:
    def step_param(self, parameter, gradient):
        pass


class BadStep(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError("no step today")

    def step_param(self, parameter, gradient):
        self.step()


def stepping_hook():
    stepping = optimizer_overlap_hooks._OptimizerHookState(NoStep())
    return optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, stepping)


# States without a group, and a hook around another: each would average over the world if left alone.
WITHOUT_A_GROUP = {
    "post_localSGD_hook": lambda: (
        post_localSGD_hook.PostLocalSGDState(None, None, 100),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "torch's post_localSGD_hook": lambda: (
        torch_local_sgd.PostLocalSGDState(None, None, 100),
        torch_local_sgd.post_localSGD_hook,
    ),
    "torch's powerSGD_hook": lambda: (torch_power_sgd.PowerSGDState(None), torch_power_sgd.powerSGD_hook),
    "powerSGD_hook": lambda: (powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook),
    "_hook_then_optimizer": lambda: (None, stepping_hook()),
}


@functools.cache  # ranks are kept
def half_of_the_world():
    """Return the group of this rank: the first two ranks or the last two."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return halves[dist.get_rank() // 2]


def averaged_in_half():
    plain = small_model(process_group=half_of_the_world())
    backward(plain)
    return gradients(plain)


def check_registry(rank):
    group = half_of_the_world()
    model = small_model(process_group=group)
    register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model)
    backward(model)
    assert torch.allclose(gradients(model), averaged_in_half(), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="not the model's own"):
        register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, small_model(process_group=group), dist.group.WORLD)


def test_the_registry_takes_the_models_group(four_ranks):
    four_ranks.run(check_registry)


def check_without_a_group(rank, name):
    state, hook = WITHOUT_A_GROUP[name]()
    model = small_model(process_group=half_of_the_world())
    with gradwire.attach(model, hook, state=state):
        backward(model)
    assert torch.allclose(gradients(model), averaged_in_half(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", WITHOUT_A_GROUP)
def test_a_hook_without_a_group_gets_the_models_own(name, four_ranks):
    four_ranks.run(check_without_a_group, name)


def check_another_group(rank, name):
    state, hook = WITHOUT_A_GROUP[name]()
    state.process_group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"State has a process group that is not the model's own"):
        gradwire.attach(small_model(process_group=half_of_the_world()), hook, state=state)


@pytest.mark.parametrize("name", [name for name in WITHOUT_A_GROUP if name != "_hook_then_optimizer"])
def test_a_state_with_another_group_is_refused(name, four_ranks):
    four_ranks.run(check_another_group, name)


def check_zero_in_a_group(rank):
    group = half_of_the_world()
    model = small_model(process_group=group)
    options = {"optimizer_class": torch.optim.SGD, "overlap_with_ddp": True, "lr": 0.0}
    zero = ZeroRedundancyOptimizer(model.parameters(), process_group=group, **options)
    gradwire.attach(model, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, zero))
    backward(model)
    assert torch.allclose(gradients(model), averaged_in_half(), rtol=1e-5, atol=1e-7)


def test_a_hook_with_a_zero_step_gets_the_models_group(four_ranks):
    four_ranks.run(check_zero_in_a_group)


def check_place_in_a_group(rank, has_group):
    group = half_of_the_world()
    model = small_model(process_group=group)
    stepping = optimizer_overlap_hooks._OptimizerHookState(BadStep(model.parameters()))
    hook = optimizer_overlap_hooks._hook_then_optimizer(debugging_hooks.noop_hook, stepping)
    model.register_comm_hook(group if has_group else SimpleNamespace(process_group=group), hook)
    with pytest.raises(ArithmeticError, match=f"^rank {rank}, step 0, bucket 0"):
        backward(model)


@pytest.mark.parametrize("has_group", [True, False], ids=["a group", "an object with a group"])
def test_an_error_of_a_hook_over_a_part_of_the_world_names_the_rank_in_the_world(has_group, four_ranks):
    four_ranks.run(check_place_in_a_group, has_group)


def check_place_of_a_step_in_backward(rank):
    model = small_model(process_group=half_of_the_world())
    _apply_optimizer_in_backward(BadStep, model.module.parameters(), {"lr": 0.1})
    hook = optimizer_overlap_hooks._apply_optim_in_backward_hook(gradient_is_bucket_view=False)
    gradwire.attach(model, hook, state=weakref.ref(model))
    with pytest.raises(gradwire.WireError, match=f"^rank {rank}, step 0, bucket 0.*no step today"):
        backward(model)


def test_an_error_of_a_step_in_backward_names_the_rank_in_the_world(four_ranks):
    four_ranks.run(check_place_of_a_step_in_backward)


def check_raw_hook_without_a_state(rank):
    world = small_model()
    backward(world)
    raw = small_model(process_group=half_of_the_world())
    raw.register_comm_hook(None, default_hooks.allreduce_hook)
    backward(raw)
    assert torch.allclose(gradients(raw), gradients(world), rtol=1e-5, atol=1e-7)


def test_a_raw_hook_without_a_state_averages_over_the_world_as_upstream(four_ranks):
    four_ranks.run(check_raw_hook_without_a_state)


def job_wrong_state(rank):
    model = small_model()
    model.register_comm_hook("world", default_hooks.bf16_compress_hook)
    with pytest.raises(TypeError, match="must be a process group .* not str"):
        backward(model)


def test_a_raw_hook_with_a_state_that_is_no_group_says_so():
    run_ranks(job_wrong_state, 1)
