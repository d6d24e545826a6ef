"""Hooks of the drop-in that DDP calls itself: wrappers, failures, and hooks around hooks."""

import copy
import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import _raw, debugging_hooks, default_hooks
from gradwire.testing import run_ranks
from tests.models import backward, gradients, small_model


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
