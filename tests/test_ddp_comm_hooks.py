"""The drop-in face: torch's names, arguments and meanings."""

import copy
import functools
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
    """Return the public functions and classes that a module defines itself."""
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
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
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


UPSTREAM = {
    DDPCommHookType.ALLREDUCE: {"rtol": 1e-5, "atol": 0},
    DDPCommHookType.FP16_COMPRESS: {"rtol": 1e-5, "atol": 1e-4},
    DDPCommHookType.BF16_COMPRESS: {"rtol": 1e-5, "atol": 1e-4},
    DDPCommHookType.QUANTIZE_PER_TENSOR: {"rtol": 1e-5, "atol": 1e-4},
    DDPCommHookType.QUANTIZE_PER_CHANNEL: {"rtol": 1e-5, "atol": 1e-4},
}


def check_upstream(rank, name):
    kind = DDPCommHookType[name]
    plain = upstream_gradient(rank, lambda model: None)
    through_registry = upstream_gradient(rank, lambda model: register_ddp_comm_hook(kind, model))
    torch.testing.assert_close(through_registry, plain, **UPSTREAM[kind])
    with_group = upstream_gradient(rank, lambda model: kind.value(model=model, state=dist.group.WORLD))
    torch.testing.assert_close(with_group, plain, **UPSTREAM[kind])


@pytest.mark.parametrize("name", [kind.name for kind in UPSTREAM])
def test_a_type_holds_upstreams_tolerances(name, two_ranks):
    two_ranks.run(check_upstream, name)


def check_upstream_noop(rank):
    plain = upstream_gradient(rank, lambda model: None)
    alone = upstream_gradient(rank, lambda model: register_ddp_comm_hook(DDPCommHookType.NOOP, model))
    dist.all_reduce(alone)
    torch.testing.assert_close(alone / 2, plain, rtol=1e-5, atol=0)


def test_noop_leaves_each_rank_its_own_gradients(two_ranks):
    two_ranks.run(check_upstream_noop)


# --- the registry sees the model's group, a raw hook takes None for the world ---


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
    with pytest.raises(ArithmeticError, match=f"^rank {group.rank()}, step 0, bucket 0"):
        backward(model)


@pytest.mark.parametrize("has_group", [True, False], ids=["a group", "an object with a group"])
def test_an_error_names_the_rank_in_the_group_of_the_state(has_group, four_ranks):
    four_ranks.run(check_place_in_a_group, has_group)


def check_place_of_a_step_in_backward(rank):
    model = small_model(process_group=half_of_the_world())
    _apply_optimizer_in_backward(BadStep, model.module.parameters(), {"lr": 0.1})
    hook = optimizer_overlap_hooks._apply_optim_in_backward_hook(gradient_is_bucket_view=False)
    gradwire.attach(model, hook, state=weakref.ref(model))
    with pytest.raises(gradwire.WireError, match="^rank [01], step 0, bucket 0.*no step today"):
        backward(model)


def test_an_error_of_a_step_in_backward_names_the_rank_in_the_models_group(four_ranks):
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


# --- wrappers ---


def test_a_wrapper_around_allreduce_is_the_compressing_hook():
    assert (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook) is default_hooks.fp16_compress_hook
    )
    assert (
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook) is default_hooks.bf16_compress_hook
    )


WRAPPERS = {
    torch.float16: default_hooks.fp16_compress_wrapper,
    torch.bfloat16: default_hooks.bf16_compress_wrapper,
}
INNER_HOOKS = [
    torch_hooks.allreduce_hook,
    default_hooks.allreduce_hook,
    default_hooks.bf16_compress_hook,
    debugging_hooks.noop_hook,
]


def check_wrapper(rank, dtype, inner):
    seen, results = set(), []

    def users_hook(state, bucket):
        seen.add(bucket.buffer().dtype)
        return torch_hooks.allreduce_hook(state, bucket)

    is_users = inner is torch_hooks.allreduce_hook
    wrapped = WRAPPERS[dtype](users_hook if is_users else inner)

    def spy(state, bucket):
        results.append(wrapped(state, bucket))
        return results[-1]

    plain, model = small_model(), small_model()
    backward(plain)
    model.register_comm_hook(None, spy)
    backward(model)
    assert all(future.value().dtype == torch.float32 for future in results), "the input's own dtype"
    assert seen == ({dtype} if is_users else set())
    if inner is not debugging_hooks.noop_hook:
        assert torch.allclose(gradients(model), gradients(plain), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("inner", INNER_HOOKS, ids=["a user's", "allreduce", "bf16_compress", "noop"])
@pytest.mark.parametrize("dtype", WRAPPERS, ids=str)
def test_a_wrapper_goes_around_any_hook_and_returns_the_inputs_dtype(dtype, inner, two_ranks):
    two_ranks.run(check_wrapper, dtype, inner)


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
    """Average plainly, but fail before anything is sent if a value is not a number."""

    communicates = True
    kernels = frozenset()

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        if flat.isnan().any():
            raise ValueError("not a number")
        yield from gradwire.fp32().exchange.rounds(flat, context)


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
    first, second = run_ranks(job_raw_failure, 2, timeout=180)
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
