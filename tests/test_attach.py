"""`attach` and the wire it returns."""

import copy
import functools
import itertools
import logging
import os
import pickle
import re
import threading
import time
import warnings
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp.options import Options
from gradwire.ddp_comm_hooks import default_hooks, powerSGD_hook
from gradwire.ddp_comm_hooks.debugging_hooks import noop_hook
from gradwire.lanes import lane as execution
from gradwire.peers.agreement import agree
from gradwire.peers.groups import PeerUnreachable, gather
from gradwire.peers.rendezvous import join_rendezvous, next_rendezvous
from gradwire.testing import run_ranks
from tests.test_bridge import backward, gradients, small_model


def mean_of(local, group=None):
    total = local.double()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


# --- what is refused ---


def job_refusals(rank):
    with pytest.raises(TypeError, match="takes a DistributedDataParallel, not Linear; wrap the model first"):
        gradwire.attach(nn.Linear(2, 2), "bf16")
    with pytest.raises(TypeError, match="takes a DistributedDataParallel, not str"):
        gradwire.attach("model", "bf16")
    model = small_model()
    with pytest.raises(ValueError, match="there is no recipe 'bf61'; did you mean 'bf16'"):
        gradwire.attach(model, "bf61")
    # A class and what makes recipes can be called, but are no hooks.
    for given, named in {
        16: "int, 16",
        None: "None",
        gradwire.bf16: "function, bf16",
        dict: "class, dict",
    }.items():
        with pytest.raises(TypeError, match=f"a recipe is text, .* or a gradwire.Recipe, not .*{named}"):
            gradwire.attach(model, given)
    with pytest.raises(TypeError, match="recipe bf16 takes no state"):
        gradwire.attach(model, "bf16", state=object())
    with pytest.raises(ValueError, match="a process group, but not the model's own"):
        gradwire.attach(model, "bf16", state=dist.new_group())

    wire = gradwire.attach(model, "bf16")
    with pytest.raises(ValueError, match=re.escape("bf16 is attached to this model already; call detach()")):
        gradwire.attach(model, "fp16")
    wire.detach()
    wire.detach()  # twice does no harm

    taken = small_model()
    taken.register_comm_hook(None, torch_hooks.allreduce_hook)
    with pytest.raises(
        ValueError, match="has a hook already, .*allreduce_hook, and DDP takes one in its life"
    ):
        gradwire.attach(taken, "bf16")

    taken = small_model()
    taken._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(ValueError, match="has a hook of DDP's own already, .*FP16_COMPRESS"):
        gradwire.attach(taken, "bf16")
    with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta, not 5"):
        gradwire.attach(model, "bf16", timeout=5)
    frozen = small_model()
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of this model requires a gradient any more"):
        gradwire.attach(frozen, "bf16")

    python_reducer = small_model()
    python_reducer._use_python_reducer = True
    with pytest.raises(ValueError, match="Python reducer"):
        gradwire.attach(python_reducer, "bf16")


def test_what_cannot_work_is_refused_with_the_reason():
    run_ranks(job_refusals, 2)


def test_hooks_are_compared_over_ranks_where_that_has_a_way():
    options = Options(verify_every=5)
    for where, is_nccl in (("cpu", False), ("cuda", True)):
        options.check(torch_hooks.allreduce_hook, torch.device(where), is_nccl=is_nccl)
    with pytest.raises(ValueError, match="verify_every= with a hook on cuda needs NCCL"):
        options.check(torch_hooks.allreduce_hook, torch.device("cuda"), is_nccl=False)


def job_around_ours(rank):
    """Hooks that look like ours, and are what somebody has made of them."""
    calls = []

    @functools.wraps(noop_hook)
    def averaging(state, bucket):
        calls.append("wrapped")
        return torch_hooks.allreduce_hook(state, bucket)

    class Proxy:
        def __call__(self, state, bucket):
            calls.append("proxy")
            return torch_hooks.allreduce_hook(state, bucket)

        def __getattr__(self, name):
            return getattr(default_hooks.fp16_compress_hook, name)

    # A Mock has every attribute one asks it for.
    mock = Mock(side_effect=torch_hooks.allreduce_hook)
    for hook in (averaging, Proxy(), mock):
        model = small_model()
        plain = small_model()
        with gradwire.attach(model, hook, state=model.process_group):
            backward(model)
        backward(plain)
        assert torch.equal(gradients(model), gradients(plain)), hook
    assert set(calls) == {"wrapped", "proxy"}
    assert mock.called


def test_a_hook_that_was_made_of_ours_is_called_and_not_taken_for_it():
    run_ranks(job_around_ours, 2)


def job_disagreement(rank):
    model = small_model()
    with pytest.raises(ValueError, match="ranks call gradwire.attach with different things") as caught:
        gradwire.attach(model, "bf16" if rank else "fp16")
    assert str(caught.value).endswith("recipe is fp16 on rank(s) 0, bf16 on rank(s) 1, 2")
    if rank == 1:
        with pytest.raises(ValueError, match="no recipe"):
            gradwire.attach(model, "nonsense")
    else:
        with pytest.raises(RuntimeError, match="attach failed on rank 1: there is no recipe 'nonsense'"):
            gradwire.attach(model, "bf16")

    error = ValueError(os.fsdecode(b"cannot read weights-\xff.bin"))
    group, timeout = dist.group.WORLD, timedelta(seconds=20)
    if rank == 1:
        agree(group, join_rendezvous(group, timeout), error, timeout)
    else:
        with pytest.raises(RuntimeError, match=r"failed on rank 1: cannot read weights-\\udcff\.bin"):
            agree(group, join_rendezvous(group, timeout), {"recipe": "bf16"}, timeout)
    with gradwire.attach(model, "bf16"):
        backward(model)


def test_ranks_that_attach_different_things_are_all_told_so():
    run_ranks(job_disagreement, 3)


def is_open(path):
    return str(path) in {
        os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
    }


def job_without_a_trace(rank, folder):
    """What `attach` does to model, state and disk, it does when all ranks agree, or not at all."""
    model, told = small_model(), []
    first = gradwire.attach(model, "bf16")
    first.give_way(lambda: told.append("gave way"))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    path = folder / f"{rank}.jsonl"
    telemetry = gradwire.Telemetry(jsonl=str(folder / "{rank}.jsonl"))
    hook = powerSGD_hook.powerSGD_hook

    def attach(model, what=hook, **options):
        return gradwire.attach(model, what, state=state, telemetry=telemetry, **options)

    def assert_untouched():
        assert not is_open(path)
        assert not path.exists()
        assert (state.process_group, state._has_names) == (None, False)

    # One rank cannot; then no rank has, and the wire that would have given way goes on.
    with pytest.raises((TypeError, RuntimeError), match="takes no state"):
        attach(model, "int4" if rank else hook)
    assert_untouched()
    assert first.attached
    backward(model)
    with pytest.raises(ValueError, match="verify_every is"):
        attach(model, verify_every=rank)
    assert_untouched()
    assert (first.attached, told) == (True, [])

    # All agree, and something fails after that.
    other, num_threads = small_model(), sum(t.name.startswith("gradwire") for t in threading.enumerate())
    other.register_comm_hook = None  # cannot be called
    with pytest.raises(TypeError, match="not callable"):
        attach(other)
    assert sum(t.name.startswith("gradwire") for t in threading.enumerate()) == num_threads, "its guard ends"
    assert not is_open(path)
    assert (state.process_group, state._has_names) == (None, False)
    del other.register_comm_hook

    attach(model)
    assert (first.attached, told) == (False, ["gave way"])
    assert (state.process_group, state._has_names) == (model.process_group, True)
    assert is_open(path)
    backward(model)
    with pytest.raises(ValueError, match="powerSGD_hook is attached to this model already"):
        attach(model)
    with gradwire.attach(other, "fp32"):  # its slot is free
        backward(other)


def test_an_attach_that_fails_leaves_everything_as_it_was(tmp_path):
    run_ranks(job_without_a_trace, 2, args=(tmp_path,))


def job_half_open(rank):
    opened, fails_at = [], 1
    open_gloo = execution.open_gloo

    def fragile(group, prefix, **options):
        if len(opened) == fails_at:
            raise RuntimeError("no more sockets")
        opened.append(open_gloo(group, prefix, **options))
        return opened[-1]

    execution.open_gloo = fragile
    with pytest.raises(RuntimeError, match="no more sockets"):
        gradwire.attach(small_model(), "bf16")
    (group,) = opened
    with pytest.raises(PeerUnreachable, match="this rank has closed the group"):
        gather([torch.zeros(1), torch.zeros(1)], group)


def test_a_lane_that_opens_half_way_closes_again():
    run_ranks(job_half_open, 2)


def job_missing(rank):
    model = small_model()
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["done"])
        return
    with pytest.raises(RuntimeError, match=r"collective, but rank\(s\) 1 of 3 did not call it within 2 s"):
        gradwire.attach(model, "bf16", timeout=timedelta(seconds=2))
    dist.distributed_c10d._get_default_store().set("done", "")


def test_attach_names_the_rank_that_is_missing():
    run_ranks(job_missing, 3)


def job_late(rank, what):
    model, store = small_model(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank\(s\) 1 of 2 did not call it within 0.3 s"):
            gradwire.attach(model, what, timeout=timedelta(seconds=0.3))
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
        with pytest.raises(RuntimeError, match=r"failed on rank 0: it gave up waiting for rank\(s\) 1"):
            gradwire.attach(model, what)
    with gradwire.attach(model, what):  # together, it works
        backward(model)


@pytest.mark.parametrize("what", ["bf16", torch_hooks.allreduce_hook], ids=["recipe", "hook"])
def test_a_rank_that_comes_too_late_does_not_go_on_alone(what):
    run_ranks(job_late, 2, args=(what,))


def job_rendezvous(rank):
    world = dist.group.WORLD
    names = [next_rendezvous(world) for _ in range(3)]
    assert len(set(names)) == 3
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    assert everyone == [names] * dist.get_world_size()
    # The count is in the store, so a group that is made again there goes on from it.
    assert world.get_group_store().add(f"gradwire/rendezvous/{rank}", 0) == 3


def test_ranks_meet_under_names_that_are_new_to_the_store():
    run_ranks(job_rendezvous, 3)


def job_forked(rank):
    model = small_model()
    gradwire.attach(model, "bf16")
    backward(model)
    child = os.fork()
    if child == 0:  # what a DataLoader's worker does when it ends
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    backward(model)


def test_a_forked_child_that_ends_leaves_the_lane_alone():
    run_ranks(job_forked, 2)


# --- groups ---


def job_subgroups(rank):
    low, high = dist.new_group([0, 2]), dist.new_group([1, 3])
    group = low if rank in (0, 2) else high
    plain = small_model(process_group=group)
    backward(plain)
    attachable = {
        "fp32": 1e-6,
        torch_hooks.allreduce_hook: 1e-6,
        default_hooks.allreduce_hook: 1e-6,
        default_hooks.bf16_compress_wrapper(torch_hooks.allreduce_hook): 2**-6,
        default_hooks.fp16_compress_wrapper(default_hooks.bf16_compress_hook): 2**-6,
    }
    for what, tolerance in attachable.items():
        model = small_model(process_group=group)
        with gradwire.attach(model, what):
            backward(model)
        error = (gradients(model) - gradients(plain)).abs().max() / gradients(plain).abs().max()
        assert error <= tolerance, what
    # Lanes are unknown to torch, so the next world-wide group does not hang.
    dist.barrier(dist.new_group())


def test_the_group_is_the_models_own():
    run_ranks(job_subgroups, 4)


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
    """What SyncBatchNorm does: a collective on the user's own group in the middle of backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.sum()[None].clone()
        dist.all_reduce(total)
        time.sleep(0.001 * dist.get_rank())
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
    # With the default buckets: torch, which splits the graph by them, takes none below a megabyte.
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
    assert not any(t.name.startswith("gradwire") for t in threading.enumerate())
    for what in ("bf16", torch_hooks.allreduce_hook):
        with gradwire.attach(model, what):
            backward(model)
            assert any(t.name.startswith("gradwire") for t in threading.enumerate())
        assert not any(t.name.startswith("gradwire") for t in threading.enumerate())
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


# --- precision ---


def job_large_and_small(rank):
    for recipe in ("fp32", "fp16", "bf16"):
        net = nn.Linear(1, 2, bias=False)
        model = DistributedDataParallel(net)
        gradwire.attach(model, recipe)
        # d loss / d weight is what the input and the factor say.
        large = 80000.0 if rank == 0 else 0.0
        (model(torch.ones(1, 1)) * torch.tensor([large, 1e-7])).sum().backward()
        world_size = dist.get_world_size()
        assert net.weight.grad[0].item() == pytest.approx(80000 / world_size, rel=2**-7)
        if recipe != "fp16":  # beside 80000, 1e-7 is below what one scale can hold
            assert net.weight.grad[1].item() == pytest.approx(1e-7, rel=2**-7)
        model.zero_grad()
        (model(torch.ones(1, 1)) * torch.tensor([1e-7, 3e38])).sum().backward()
        assert net.weight.grad[1].item() == pytest.approx(3e38, rel=2**-7)


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_mean_that_fits_is_never_lost(world_size):
    run_ranks(job_large_and_small, world_size)


def job_large_sum(rank):
    net = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(net)
    gradwire.attach(model, "fp16:reduction=sum")
    (model(torch.ones(1, 1)) * (1.8e38 if rank else 1e38)).sum().backward()
    assert net.weight.grad.item() == pytest.approx(2.8e38, rel=2**-10)


def test_a_sum_that_fits_is_never_lost():
    run_ranks(job_large_sum, 2)


def job_tiny(rank):
    for recipe in ("fp16", "bf16"):
        net = nn.Linear(1, 1, bias=False)
        model = DistributedDataParallel(net)
        gradwire.attach(model, recipe)
        (model(torch.ones(1, 1)) * 1e-7).sum().backward()
        assert net.weight.grad.item() == pytest.approx(1e-7, rel=2**-7)


def test_tiny_gradients_survive_on_eight_ranks():
    run_ranks(job_tiny, 8)


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fp64 = nn.Linear(9, 7).double()
        self.fp32 = nn.Linear(7, 5)
        self.bf16 = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.fp16 = nn.Parameter(torch.randn(5, dtype=torch.float16))
        self.c64 = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        x = self.fp32(self.fp64(x.double()).float())
        return (
            (x * self.bf16.float() * self.fp16.float() * torch.view_as_real(self.c64).sum(1)).square().sum()
        )


def job_mixed_dtypes(rank):
    torch.manual_seed(0)
    net = MixedDtypes()
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    for recipe, tolerance in {"fp32": 2**-8, "fp16": 2**-7, "bf16": 2**-6, "int8:feedback=true": 0.1}.items():
        with gradwire.attach(model, recipe):
            for step in range(3):
                torch.manual_seed(10 * step + rank)
                x = torch.randn(4, 9)
                model.zero_grad()
                local.zero_grad()
                model(x).backward()
                local(x).backward()
                for (name, p), q in zip(net.named_parameters(), local.parameters(), strict=True):
                    assert p.grad.dtype == p.dtype
                    have, want = (torch.view_as_real(g) if g.is_complex() else g for g in (p.grad, q.grad))
                    expected = mean_of(want)
                    error = (have.double() - expected).abs().max() / expected.abs().max()
                    assert error < (1e-6 if recipe == "fp32" and p.dtype.itemsize > 2 else tolerance), (
                        name,
                        recipe,
                    )


def test_buckets_of_every_dtype_are_averaged_in_their_own():
    run_ranks(job_mixed_dtypes, 3)


class SparseModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 4, sparse=True)
        self.linear = nn.Linear(4, 3)

    def forward(self, indices):
        return self.linear(self.embedding(indices)).square().mean()


def job_sparse_bf16(rank):
    warnings.simplefilter("error")  # DDP on its own has none either
    embedding = nn.Embedding(4, 1, sparse=True, dtype=torch.bfloat16)
    model = DistributedDataParallel(embedding)
    with gradwire.attach(model, "fp32:reduction=sum"):
        model(torch.tensor([2])).sum().mul(256.0 if rank == 0 else 1.0).backward()
    # One by one, in bf16, the ones would be lost beside 256.
    assert embedding.weight.grad.to_dense()[2].item() == 260


def test_sparse_16_bit_gradients_are_summed_in_fp32_without_a_warning():
    run_ranks(job_sparse_bf16, 4)


def job_sparse(rank, recipe):
    torch.manual_seed(0)
    net = SparseModel()
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    with gradwire.attach(model, recipe):
        for step in range(4):
            # Different rows on each rank, one of them twice, and on rank 0 sometimes one alone.
            indices = torch.tensor([rank, rank, 7, 10 * rank + step][: 1 if rank == 0 and step == 2 else 4])
            model.zero_grad()
            local.zero_grad()
            model(indices).backward()
            local(indices).backward()
            grad = net.embedding.weight.grad
            assert grad.is_sparse
            expected = mean_of(local.embedding.weight.grad.to_dense())
            assert torch.allclose(grad.to_dense().double(), expected, rtol=1e-5, atol=1e-9)
            everyone = [torch.empty(50, 4) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, grad.to_dense())
            assert all(torch.equal(other, everyone[0]) for other in everyone)
            expected = mean_of(local.linear.weight.grad)
            assert torch.allclose(net.linear.weight.grad.double(), expected, rtol=2**-6, atol=1e-4)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_sparse_gradients_are_averaged(recipe):
    run_ranks(job_sparse, 3, args=(recipe,))


def job_join_early(rank):
    """A rank runs out of input while steps are still exchanged in the first buckets."""
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


def job_stats(rank):
    world_size = dist.get_world_size()
    for name in ("fp32", "fp16", "bf16"):
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

    model = small_model()
    wire = gradwire.attach(model, torch_hooks.allreduce_hook)
    backward(model)
    assert wire.stats().bytes_sent is None, "what a foreign hook sends cannot be known"
    assert wire.stats().steps[0].buckets[0].wait_ms >= 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_stats_count_what_wire_bytes_promises(world_size):
    run_ranks(job_stats, world_size)
