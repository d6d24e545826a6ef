"""The drop-in face: torch's names, arguments and meanings."""

import copy
import gc
import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks as torch_package
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.ddp_comm_hooks as our_package
from gradwire.ddp_comm_hooks import (
    DDPCommHookType,
    _raw,
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

THEIRS = {m.name for m in pkgutil.iter_modules(torch_package.__path__)}
# Modules without __all__, and names that are private and yet used.
NAMES = {
    "powerSGD_hook": ["PowerSGDState", "powerSGD_hook", "batched_powerSGD_hook"],
    "quantization_hooks": ["quantization_pertensor_hook", "quantization_perchannel_hook"],
    "post_localSGD_hook": ["PostLocalSGDState", "post_localSGD_hook"],
    "optimizer_overlap_hooks": [
        "_OptimizerHookState",
        "_hook_then_optimizer",
        "_apply_optim_in_backward_hook",
    ],
    "mixed_precision_hooks": ["_AllreduceUpcastHookState", "_reducer_allreduce_and_upcast_hook"],
}


def own_public_names(module):
    """The functions and classes that a module defines itself and does not hide."""
    kinds = (types.FunctionType, type)
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, kinds) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def names_of(module):
    short = module.__name__.rpartition(".")[2]
    return sorted({*getattr(module, "__all__", ()), *NAMES.get(short, ()), *own_public_names(module)})


def assert_same_signature(ours, theirs, what):
    wanted, have = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    assert list(have)[: len(wanted)] == list(wanted), what
    for name, parameter in wanted.items():
        assert have[name].default == parameter.default, f"{what}: {name}"
        assert have[name].kind == parameter.kind, f"{what}: {name}"


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_a_module_has_every_name_argument_and_default_of_torchs(name):
    theirs = importlib.import_module(f"{torch_package.__name__}.{name}")
    ours = importlib.import_module(f"gradwire.ddp_comm_hooks.{name}")
    names = names_of(theirs)
    assert names, "there is something to compare"
    for public in names:
        assert hasattr(ours, public), public
        assert_same_signature(getattr(ours, public), getattr(theirs, public), f"{name}.{public}")
        if inspect.isclass(getattr(theirs, public)):
            for method in own_methods(getattr(theirs, public)):
                their_method = getattr(getattr(theirs, public), method)
                assert_same_signature(getattr(getattr(ours, public), method), their_method, method)


def own_methods(kind):
    return [
        name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")
    ]


def test_the_package_has_all_of_torchs_modules_names_and_members():
    assert set(torch_package.__all__) <= set(our_package.__all__)
    assert_same_signature(register_ddp_comm_hook, torch_package.register_ddp_comm_hook, "register")
    ours = {m.name for m in pkgutil.iter_modules(our_package.__path__)} | set(DDPCommHookType.__members__)
    theirs = THEIRS | set(torch_package.DDPCommHookType.__members__)
    assert theirs <= ours


def test_members_are_torchs_first_and_in_its_order_and_callable():
    ours = list(DDPCommHookType.__members__)
    wanted = list(torch_package.DDPCommHookType.__members__)
    assert ours[: len(wanted)] == wanted
    assert all(callable(member.value) for member in DDPCommHookType)
    assert all(isinstance(member, DDPCommHookType) for member in DDPCommHookType)


IMPORTING = """
import importlib, sys, warnings

theirs, ours = sys.argv[1].split(), sys.argv[2].split()
for name in theirs:  # whose own warnings are torch's business
    importlib.import_module(name)
warnings.simplefilter("error")
for name in ours:
    importlib.import_module(name)
"""


def test_importing_raises_no_warning():
    def all_of(package):
        names = [f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__)]
        return " ".join([package.__name__, *names])

    theirs = f"{all_of(torch_package)} torch.distributed.optim"
    command = [sys.executable, "-c", IMPORTING, theirs, all_of(our_package)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- upstream's own tolerances: two ranks, a 40 x 20 parameter ---


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.p = nn.Parameter(torch.randn(40, 20))

    def forward(self, x):
        return self.p * x


def upstream_gradient(rank, register):
    model = DistributedDataParallel(Task())
    register(model)
    for step in range(3):
        model.zero_grad()
        model(torch.full((1,), float(rank + step))).mean().backward()
    return model.module.p.grad


def job_upstream(rank):
    plain = upstream_gradient(rank, lambda model: None)
    bounds = {
        DDPCommHookType.ALLREDUCE: {"rtol": 1e-5, "atol": 0},
        DDPCommHookType.FP16_COMPRESS: {"rtol": 1e-5, "atol": 1e-4},
        DDPCommHookType.BF16_COMPRESS: {"rtol": 1e-5, "atol": 1e-4},
        DDPCommHookType.QUANTIZE_PER_TENSOR: {"rtol": 1e-5, "atol": 1e-4},
        DDPCommHookType.QUANTIZE_PER_CHANNEL: {"rtol": 1e-5, "atol": 1e-4},
    }
    for kind, bound in bounds.items():
        through_registry = upstream_gradient(rank, lambda m, k=kind: register_ddp_comm_hook(k, m))
        torch.testing.assert_close(through_registry, plain, **bound)
        with_group = upstream_gradient(rank, lambda m, k=kind: k.value(model=m, state=dist.group.WORLD))
        torch.testing.assert_close(with_group, plain, **bound)
    alone = upstream_gradient(rank, lambda m: register_ddp_comm_hook(DDPCommHookType.NOOP, m))
    dist.all_reduce(alone)
    torch.testing.assert_close(alone / 2, plain, rtol=1e-5, atol=0)


def test_types_hold_upstreams_tolerances():
    run_ranks(job_upstream, 2)


# --- the registry sees the model's group, a raw hook takes None for the world ---


class NoStep:
    def step_param(self, parameter, gradient):
        pass


class BadStep(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError("no step today")

    def step_param(self, parameter, gradient):
        self.step()


def hooks_that_would_take_the_world():
    """States without a group, and hooks around others; each would average over the world if left alone."""
    stepping = optimizer_overlap_hooks._OptimizerHookState(NoStep())
    return [
        (post_localSGD_hook.PostLocalSGDState(None, None, 100), post_localSGD_hook.post_localSGD_hook),
        (torch_local_sgd.PostLocalSGDState(None, None, 100), torch_local_sgd.post_localSGD_hook),
        (torch_power_sgd.PowerSGDState(None), torch_power_sgd.powerSGD_hook),
        (powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook),
        (None, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, stepping)),
    ]


def job_groups(rank):
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    plain = small_model(process_group=group)
    backward(plain)
    model = small_model(process_group=group)
    register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model)
    backward(model)
    assert torch.allclose(gradients(model), gradients(plain), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="not the model's own"):
        register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, small_model(process_group=group), dist.group.WORLD)

    for state, hook in hooks_that_would_take_the_world():
        model = small_model(process_group=group)
        with gradwire.attach(model, hook, state=state):
            backward(model)
        assert torch.allclose(gradients(model), gradients(plain), rtol=1e-5, atol=1e-7), hook
    for state, hook in hooks_that_would_take_the_world():
        if state is not None:
            state.process_group = dist.group.WORLD
            with pytest.raises(ValueError, match=r"State has a process group that is not the model's own"):
                gradwire.attach(small_model(process_group=group), hook, state=state)
    model = small_model(process_group=group)
    options = {"optimizer_class": torch.optim.SGD, "overlap_with_ddp": True, "lr": 0.0}
    zero = ZeroRedundancyOptimizer(model.parameters(), process_group=group, **options)
    gradwire.attach(model, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, zero))
    backward(model)
    assert torch.allclose(gradients(model), gradients(plain), rtol=1e-5, atol=1e-7)

    # A place names the rank in the model's group, as it does with recipes.
    stepping = optimizer_overlap_hooks._OptimizerHookState(BadStep(plain.parameters()))
    for state in (group, SimpleNamespace(process_group=group)):
        model = small_model(process_group=group)
        hook = optimizer_overlap_hooks._hook_then_optimizer(debugging_hooks.noop_hook, stepping)
        model.register_comm_hook(state, hook)
        with pytest.raises(ArithmeticError, match=f"^rank {group.rank()}, step 0, bucket 0"):
            backward(model)
    model = small_model(process_group=group)
    _apply_optimizer_in_backward(BadStep, model.module.parameters(), {"lr": 0.1})
    hook = optimizer_overlap_hooks._apply_optim_in_backward_hook(gradient_is_bucket_view=False)
    gradwire.attach(model, hook, state=weakref.ref(model))
    with pytest.raises(gradwire.WireError, match="^rank [01], step 0, bucket 0.*no step today"):
        backward(model)

    world = small_model()
    backward(world)
    raw = small_model(process_group=group)
    raw.register_comm_hook(None, default_hooks.allreduce_hook)
    backward(raw)
    assert torch.allclose(gradients(raw), gradients(world), rtol=1e-5, atol=1e-7)


def test_groups_mean_what_they_mean_upstream():
    run_ranks(job_groups, 4)


def job_wrong_state(rank):
    model = small_model()
    model.register_comm_hook("world", default_hooks.bf16_compress_hook)
    with pytest.raises(TypeError, match="must be a process group .* not str"):
        backward(model)


def test_a_raw_hook_with_a_state_that_is_no_group_says_so():
    run_ranks(job_wrong_state, 1)


# --- wrappers ---


def test_a_wrapper_around_allreduce_is_the_compressing_hook():
    assert (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook) is default_hooks.fp16_compress_hook
    )
    assert (
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook) is default_hooks.bf16_compress_hook
    )


def job_wrappers(rank):
    seen = []

    def users_hook(state, bucket):
        seen.append(bucket.buffer().dtype)
        return torch_hooks.allreduce_hook(state, bucket)

    plain = small_model()
    backward(plain)
    wrappers = {
        torch.float16: default_hooks.fp16_compress_wrapper,
        torch.bfloat16: default_hooks.bf16_compress_wrapper,
    }
    for dtype, wrapper in wrappers.items():
        for inner in (
            users_hook,
            default_hooks.allreduce_hook,
            default_hooks.bf16_compress_hook,
            debugging_hooks.noop_hook,
        ):
            results, wrapped = [], wrapper(inner)
            model = small_model()

            def spy(state, bucket, wrapped=wrapped, results=results):
                future = wrapped(state, bucket)
                results.append(future)
                return future

            model.register_comm_hook(None, spy)
            backward(model)
            assert all(future.value().dtype == torch.float32 for future in results), "the input's own dtype"
            if inner is not debugging_hooks.noop_hook:
                assert torch.allclose(gradients(model), gradients(plain), rtol=2**-6, atol=1e-3)
        assert set(seen) == {dtype}
        seen.clear()


def test_wrappers_go_around_any_hook_and_give_back_the_inputs_dtype():
    run_ranks(job_wrappers, 2)


def job_raw_overflow(rank):
    for hook in (
        default_hooks.fp16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        net = nn.Linear(1, 1, bias=False)
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, hook)
        (model(torch.ones(1, 1)) * (80000.0 if rank == 0 else 0.0)).sum().backward()
        assert net.weight.grad.item() == 40000.0


def test_80000_and_0_average_to_40000_in_fp16():
    run_ranks(job_raw_overflow, 2)


@dataclass(frozen=True)
class Careful:
    """Averages plainly, and fails before anything is sent where something is not a number."""

    communicates = True
    kernels = frozenset()

    def run(self, flat, context):
        if flat.isnan().any():
            raise ValueError("not a number")
        gradwire.fp32().exchange.run(flat, context)


def job_raw_failure(rank):
    recipe = gradwire.Recipe("careful", Careful())

    def hook(state, bucket):
        return _raw.run_recipe(recipe, state, bucket)

    failed = small_model()
    failed.register_comm_hook(None, hook)
    for step in range(2):
        with pytest.raises(gradwire.WireError, match="rank 1, step 0, bucket .*: ValueError: not a number"):
            failed(torch.full((4, 10), torch.nan if rank == 1 and step == 0 else 1.0)).sum().backward()

    copied = DistributedDataParallel(copy.deepcopy(failed.module), bucket_cap_mb=0.001)
    expected, both = small_model(), [small_model(), copied]
    backward(expected, 0)
    for model in both:
        model.register_comm_hook(None, hook)
        for _ in range(2):
            backward(model, 0)
        assert torch.equal(gradients(model), gradients(expected))
    models = _raw._models[dist.group.WORLD][recipe, "cpu"]
    bridges = [weakref.ref(models._bridges[next(model.parameters())]) for model in (failed, *both)]
    assert len({id(bridge()) for bridge in bridges}) == 3, "each model has its own"
    del both, copied, model
    gc.collect()
    assert [bridge() for bridge in bridges[1:]] == [None] * 2, "they end with their models"

    # In one backward pass nothing tells models apart before their parameters are known.
    both = [small_model() for _ in range(2)]
    for model in both:
        model.register_comm_hook(None, hook)
    for _ in range(2):
        torch.manual_seed(rank)
        sum(model(torch.randn(4, 10)).square().mean() for model in both).backward()
    assert models._bridges[next(both[0].parameters())] is models._bridges[next(both[1].parameters())]
    return [gradients(model) for model in both]


def test_a_raw_hook_that_failed_has_failed_for_its_own_model_alone():
    first, second = run_ranks(job_raw_failure, 2, timeout=30)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def job_is_last(rank):
    model = small_model()
    flags = []

    def spy(state, bucket):
        flags.append(bucket.is_last())
        return default_hooks.bf16_compress_hook(state, bucket)

    model.register_comm_hook(None, spy)
    for step in range(3):
        flags.clear()
        backward(model, step)
        assert flags == [False] * (len(flags) - 1) + [True]
    assert len(flags) >= 3


def test_hooks_nest_inside_a_users_hook_and_is_last_is_true_on_the_last_bucket_alone():
    run_ranks(job_is_last, 2)
