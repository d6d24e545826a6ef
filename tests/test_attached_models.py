"""Models with a wire, in the ways they are used: groups, compiling, copies, `join`, `detach`, figures."""

import copy
import itertools
import logging
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import default_hooks
from gradwire.testing import run_ranks
from tests.models import backward, gradients, small_model
from tests.threads import lasting_threads

# --- groups ---


# What is attached, and how far off it may be.
IN_SUBGROUPS = {
    "a recipe": ("fp32", 1e-6),
    "torch's hook": (torch_hooks.allreduce_hook, 1e-6),
    "a hook of ours": (default_hooks.allreduce_hook, 1e-6),
    "a wrapped hook of torch's": (default_hooks.bf16_compress_wrapper(torch_hooks.allreduce_hook), 2**-6),
    "a wrapped hook of ours": (default_hooks.fp16_compress_wrapper(default_hooks.bf16_compress_hook), 2**-6),
}


def check_subgroup(rank, name):
    what, tolerance = IN_SUBGROUPS[name]
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    group = even if rank in (0, 2) else odd
    plain, model = small_model(process_group=group), small_model(process_group=group)
    backward(plain)
    with gradwire.attach(model, what):
        backward(model)
    error = (gradients(model) - gradients(plain)).abs().max() / gradients(plain).abs().max()
    assert error <= tolerance
    # Lanes are unknown to torch, so the next group of the world does not hang.
    dist.barrier(dist.new_group())


@pytest.mark.parametrize("name", IN_SUBGROUPS)
def test_the_group_is_the_models_own(name, four_ranks):
    four_ranks.run(check_subgroup, name)


def job_one_rank(rank):
    for recipe in gradwire.RECIPES:
        plain, model = small_model(), small_model()
        wire = gradwire.attach(model, recipe)
        backward(plain)
        backward(model)
        assert torch.equal(gradients(plain), gradients(model)), recipe
        assert wire.stats().bytes_sent == 0


def test_one_rank_alone_works():
    run_ranks(job_one_rank, 1)


class UsersCollective(torch.autograd.Function):
    """A collective on the user's own group in the middle of backward, as SyncBatchNorm has."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.sum()[None].clone()
        dist.all_reduce(total)
        # Ranks leave one after the other.
        rank = dist.get_rank()
        if rank > 0:
            dist.recv(total, rank - 1)
        if rank < dist.get_world_size() - 1:
            dist.send(total, rank + 1)
        return grad


class Talkative(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = UsersCollective.apply(layer(x).tanh())
        return x


def job_users_collectives(rank):
    torch.manual_seed(0)
    net = Talkative()
    plain = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.001)
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    with gradwire.attach(model, "fp32") as wire:
        for step in range(20):
            for each in (plain, model):
                each.zero_grad()
                torch.manual_seed(10 * step + rank)
                each(torch.randn(3, 20)).square().mean().backward()
            assert torch.allclose(gradients(model), gradients(plain), rtol=1e-5, atol=1e-8)
        assert len(wire.layout()) >= 3


def test_the_users_own_collectives_during_backward_do_not_collide():
    run_ranks(job_users_collectives, 3)


# --- wrapping, copying, detaching ---


def job_compiled(rank):
    def compiled(module):
        return torch.compile(module, backend="eager")

    plain = small_model()
    # With the default buckets: torch splits the graph by them, and takes none below a megabyte.
    outside = compiled(DistributedDataParallel(copy.deepcopy(plain.module)))
    inside = DistributedDataParallel(compiled(copy.deepcopy(plain.module)))
    for model in (outside, inside):
        with gradwire.attach(model, "fp32") as wire:
            for seed in range(3):
                backward(plain, seed)
                backward(model, seed)
                assert torch.allclose(gradients(model), gradients(plain), rtol=1e-5, atol=1e-8)
            assert wire.stats().num_steps == 3
            named = {slot.name for bucket in wire.layout() for slot in bucket.slots}
            assert named == {name for name, _ in plain.module.named_parameters()}


def test_compiled_models_are_averaged_whichever_way_round_they_are_wrapped():
    run_ranks(job_compiled, 2)


def job_accumulation(rank):
    plain, model = small_model(), small_model()
    with gradwire.attach(model, "fp32"):
        for each in (plain, model):
            for seed in range(6):
                torch.manual_seed(100 * rank + seed)
                each(torch.randn(4, 10)).square().mean().backward()  # without zero_grad, without no_sync
    assert torch.allclose(gradients(model), gradients(plain), rtol=1e-5, atol=1e-8)


def test_gradients_accumulate_without_no_sync_as_they_do_in_plain_ddp():
    run_ranks(job_accumulation, 2)


def job_copies(rank):
    model = small_model()
    gradwire.attach(model, "bf16")
    backward(model)
    twin = copy.deepcopy(model)
    with gradwire.attach(twin, "fp16") as wire:
        backward(twin)
        assert wire.stats().num_steps == 1
    pickle.loads(pickle.dumps(model.module))


def test_a_copy_of_an_attached_model_is_free():
    run_ranks(job_copies, 2)


def check_uncopied(rank):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = [lambda: gradwire.attach(model, "bf16"), lambda: gradwire.Averager("bf16")]
    made.append(lambda: gradwire.LocalSGD(model, optimizer, period=2))
    for make in made:
        with make() as owner:
            for act in (copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be copied or pickled: save its state_dict"):
                    act({"trainer": owner})


def test_what_has_threads_says_what_to_save_when_it_is_copied_or_pickled(two_ranks):
    two_ranks.run(check_uncopied)


def job_detach(rank):
    plain, model = small_model(), small_model()
    wire = gradwire.attach(model, "noop")
    assert wire.attached
    assert "noop, attached" in repr(wire)
    backward(plain)
    backward(model)
    assert not torch.allclose(gradients(plain), gradients(model))
    wire.detach()
    assert not wire.attached
    assert not lasting_threads()
    for what in ("bf16", torch_hooks.allreduce_hook):
        with gradwire.attach(model, what):
            backward(model)
            assert lasting_threads()
        assert not lasting_threads()
    for seed in range(3):
        backward(plain, seed)
        backward(model, seed)
        assert torch.equal(gradients(plain), gradients(model))
    second = gradwire.attach(model, "fp32")
    backward(plain)
    backward(model)
    assert torch.equal(gradients(plain), gradients(model))
    wire.detach()  # an old wire does not take a new one's place
    assert second.attached


def test_detach_returns_the_model_to_plain_averaging_and_attach_works_again():
    run_ranks(job_detach, 2)


def job_disabled(rank):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("gradwire").addHandler(handler)
    os.environ["GRADWIRE_DISABLE"] = "1"
    plain, model = small_model(), small_model()
    with gradwire.attach(model, "noop") as wire:
        backward(plain)
        backward(model)
    assert torch.equal(gradients(plain), gradients(model))
    assert not wire.attached
    assert wire.stats().num_steps == 0
    assert [r.levelname for r in records] == ["WARNING"]
    assert "GRADWIRE_DISABLE is set" in records[0].getMessage()
    os.environ["GRADWIRE_DISABLE"] = "1" if rank else "0"
    with pytest.raises(ValueError, match=r"GRADWIRE_DISABLE is not set on rank\(s\) 0, set on rank\(s\) 1"):
        gradwire.attach(small_model(), "bf16")


def test_gradwire_disable_leaves_ddp_alone():
    run_ranks(job_disabled, 2)


def job_join_early(rank):
    """Run out of input on one rank while steps are still exchanged in the first buckets."""
    for num_batches in ((1, 3), (1, 2), (2, 4)):
        layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.005)
        with gradwire.attach(model, "int4") as wire, model.join():
            for _ in range(num_batches[rank]):
                model.zero_grad()
                model(torch.randn(3, 40)).square().sum().backward()
        assert wire.stats().num_steps >= num_batches[rank]


def test_a_rank_may_join_after_its_first_step():
    run_ranks(job_join_early, 2)


def job_join_divisor(rank):
    world_size = dist.get_world_size()
    for divide_by_initial, detached in itertools.product((True, False), (False, True)):
        net = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        model = DistributedDataParallel(net)
        wire = gradwire.attach(model, "fp32")
        if detached:
            wire.detach()
        seen = []
        with model.join(divide_by_initial_world_size=divide_by_initial):
            for _ in range(2 + rank):
                model.zero_grad()
                model(torch.full((1, 3), 3.0, dtype=torch.float64)).sum().backward()
                seen.append(net.weight.grad[0, 0].item())
        num_active = [sum(r + 2 > step for r in range(world_size)) for step in range(len(seen))]
        expected = [3 * n / (world_size if divide_by_initial else n) for n in num_active]
        assert seen == pytest.approx(expected, rel=1e-15)


def test_join_divides_by_the_ranks_that_it_is_told_to():
    run_ranks(job_join_divisor, 3)


# --- figures ---


def check_stats(rank, name):
    world_size = dist.get_world_size()
    recipe, model = gradwire.recipe(name), small_model()
    wire = gradwire.attach(model, recipe)
    for seed in range(4):
        backward(model, seed)
    stats, layout = wire.stats(), wire.layout()
    assert stats.num_steps == 4
    assert [step.step for step in stats.steps] == [0, 1, 2, 3]
    last = stats.steps[-1]
    assert [b.bucket for b in last.buckets] == list(range(len(layout)))
    for figures, bucket in zip(last.buckets, layout, strict=True):
        promised = recipe.wire_bytes(bucket.numel, bucket.dtype, rank=rank, world_size=world_size)
        assert figures.bytes_sent == promised
        assert 0 < figures.num_messages <= 2 * (world_size - 1)
        assert figures.wait_ms >= 0
        assert figures.work_ms > 0
    everything = [b for step in stats.steps for b in step.buckets]
    assert stats.bytes_sent == sum(b.bytes_sent for b in everything)
    assert stats.num_messages == sum(b.num_messages for b in everything)


@pytest.mark.parametrize("ranks", ["two_ranks", "three_ranks"])
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_stats_count_the_bytes_of_wire_bytes(name, ranks, request):
    request.getfixturevalue(ranks).run(check_stats, name)


def check_stats_of_a_hook(rank):
    model = small_model()
    wire = gradwire.attach(model, torch_hooks.allreduce_hook)
    backward(model)
    assert wire.stats().bytes_sent is None
    assert wire.stats().steps[0].buckets[0].wait_ms >= 0


def test_stats_do_not_know_what_a_hook_sends(two_ranks):
    two_ranks.run(check_stats_of_a_hook)
