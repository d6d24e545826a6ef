"""The drop-in face: torch's names, arguments and meanings."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks as torch_package
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.ddp_comm_hooks as our_package
from gradwire.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    register_ddp_comm_hook,
)

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


def test_the_package_has_torchs_short_names_of_modules():
    theirs = {name for name, value in vars(torch_package).items() if inspect.ismodule(value)}
    short = {
        name for name in theirs if getattr(torch_package, name).__name__.startswith(torch_package.__name__)
    }
    assert short >= {"default", "powerSGD"}
    assert {name for name in short if not inspect.ismodule(getattr(our_package, name, None))} == set()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (torch_package.DDPCommHookType.FP16_COMPRESS, "import the name from gradwire.ddp_comm_hooks"),
        (default_hooks.fp16_compress_hook, "not a hook: give that to model.register_comm_hook"),
        ("FP16_COMPRESS", "such as DDPCommHookType.FP16_COMPRESS, not 'FP16_COMPRESS'"),
    ],
)
def test_what_is_no_type_of_hook_is_refused_with_what_to_do(kind, text):
    with pytest.raises(TypeError, match=text):
        register_ddp_comm_hook(kind, torch.nn.Linear(2, 2))


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
