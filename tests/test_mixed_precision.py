"""DDP's `mixed_precision=` and a recipe at once; on CPU with stand-ins for the events torch lacks there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import gradwire
from gradwire.ddp_comm_hooks import mixed_precision_hooks
from gradwire.testing import run_ranks
from tests.cpu_events import NoEvent


def test_the_names_are_torchs_own_which_ddp_imports():
    for name in ("_AllreduceUpcastHookState", "_reducer_allreduce_and_upcast_hook"):
        assert getattr(mixed_precision_hooks, name) is getattr(torch_module, name)


def net_of():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
    net[2].bias.requires_grad_(False)
    return net


def model_of(reduce_dtype=torch.float32, **options):
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return DistributedDataParallel(net_of(), bucket_cap_mb=0.001, mixed_precision=config, **options)


def batch(rank, step):
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * rank + step))


def expected_gradients(rank, step):
    """Return the mean of what each rank computes in bf16, found without DDP."""
    net = net_of().bfloat16()
    net(batch(rank, step).bfloat16()).float().square().mean().backward()
    total = torch.cat([p.grad.float().flatten() for p in net.parameters() if p.requires_grad])
    dist.all_reduce(total)
    return total / dist.get_world_size()


def gradients_of(model, rank, step):
    model.zero_grad()
    model(batch(rank, step)).float().square().mean().backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in model.parameters()), "full precision after backward"
    assert all(p.grad.dtype == torch.float32 for p in parameters)
    return torch.cat([p.grad.flatten() for p in parameters])


def fresh_tensor(state, bucket):
    """Average into memory that is not the bucket's own."""
    return torch_hooks.allreduce_hook(state, bucket).then(lambda done: done.value().clone())


def job_without_events(rank):
    with pytest.raises(ValueError, match="needs an accelerator's events; on CPU leave it out"):
        gradwire.attach(model_of(), "bf16")


def test_without_an_accelerator_it_is_refused_with_the_reason():
    run_ranks(job_without_events, 1)


def with_stand_ins():
    torch.Event = NoEvent
    torch.accelerator.current_stream = NoEvent


def check_composition(rank, recipe, reduce_dtype, as_view):
    with_stand_ins()
    model = model_of(reduce_dtype=reduce_dtype, gradient_as_bucket_view=as_view)
    wire = gradwire.attach(model, recipe)
    for step in range(4):
        if step == 3:
            wire.detach()  # DDP's own way again
        ours, expected = gradients_of(model, rank, step), expected_gradients(rank, step)
        largest = (ours - expected).abs().max() / expected.abs().max()
        exact = reduce_dtype == torch.float32 and recipe != "bf16"
        assert largest <= (1e-6 if exact else 2.0**-7), step
        everyone = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, ours)
        assert all(torch.equal(ours, other) for other in everyone)
    if recipe == "bf16":
        assert wire.stats().bytes_sent == 3 * 2 * ours.numel(), "3 steps, 2 bytes a value"


@pytest.mark.parametrize("as_view", [False, True], ids=["own gradients", "gradients as views"])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", fresh_tensor])
def test_a_recipe_and_mixed_precision_compose(recipe, reduce_dtype, as_view, two_ranks):
    two_ranks.run(check_composition, recipe, reduce_dtype, as_view)


def raising(state, bucket):
    raise LookupError("nothing here")


def check_failure(rank):
    with_stand_ins()
    model = model_of()
    with gradwire.attach(model, raising), pytest.raises(LookupError, match="bucket 0, hook .*raising"):
        gradients_of(model, rank, 0)
    torch.testing.assert_close(
        gradients_of(model, rank, 0), expected_gradients(rank, 0), rtol=1e-5, atol=1e-7
    )


def test_a_model_goes_on_after_a_hook_has_failed(two_ranks):
    two_ranks.run(check_failure)


def check_overlap(rank):
    with_stand_ins()
    model = model_of()
    with (
        gradwire.attach(model, "fp32") as wire,
        pytest.raises(ValueError, match="made with mixed_precision="),
    ):
        gradwire.overlap_optimizer(wire, lambda params: torch.optim.SGD(params, lr=0.1))


def test_an_optimizer_that_overlaps_is_refused(two_ranks):
    two_ranks.run(check_overlap)
