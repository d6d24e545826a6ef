"""ZeRO's steps in a hook equal DDP with an ordinary optimizer."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import ddp_zero_hook, default_hooks
from gradwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from gradwire.testing import run_ranks
from tests.local_runs import assert_same_on_all_ranks, flat, loss_of, net
from tests.overlap_runs import FAILING_STEP, groups, model_of, train_until_it_fails
from tests.sizes import usually

NUM_STEPS = 6
HOOKS = {"fp32": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook}


def expected_after(rank, kind, options, recipe, with_groups):
    """DDP with the same averaging and an optimizer of its own on every rank."""
    model = model_of()
    model.register_comm_hook(None, HOOKS[recipe])  # as the inner hook: buckets are exchanged as they arrive
    optimizer = kind(groups(model.module) if with_groups else model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        scheduler.step()
    return flat(model), optimizer.state_dict()


def train(rank, make_hook, inner, kind, options, with_groups, shard_buckets, **ddp_options):
    model = model_of(**ddp_options)
    params = groups(model.module) if with_groups else model.parameters()
    zero = ZeroRedundancyOptimizer(params, kind, overlap_with_ddp=True, **options)
    model.register_comm_hook(None, make_hook(inner, model, zero, shard_buckets=shard_buckets))
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 2, gamma=0.5)
    zero._opt_called = True  # the scheduler would ask for zero.step(), which ZeRO asks to leave out
    for step in range(NUM_STEPS):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        assert_same_on_all_ranks(model)
        scheduler.step()
    return model, zero


def job_parity(rank):
    ddp_zero_hook._BUCKET_BYTES = 2000  # so that a small model has several buckets to own
    sgd, adam = {"lr": 0.1, "momentum": 0.9}, {"lr": 0.01}
    makers = (hook_with_zero_step, hook_with_zero_step_interleaved)
    for kind, options in ((torch.optim.SGD, sgd), (torch.optim.AdamW, adam)):
        for inner, recipe in (
            (default_hooks.allreduce_hook, "fp32"),
            (default_hooks.bf16_compress_hook, "bf16"),
        ):
            for with_groups in (False, True):
                expected, _ = expected_after(rank, kind, options, recipe, with_groups)
                for make_hook in makers:
                    for shard_buckets in (False, True):
                        model, zero = train(rank, make_hook, inner, kind, options, with_groups, shard_buckets)
                        torch.testing.assert_close(flat(model), expected, rtol=1e-6, atol=1e-7)
                        held = sum(len(state) > 0 for state in zero.optim.state.values())
                        assert held < len(list(model.parameters())), "state is shared out"
    expected, _ = expected_after(rank, torch.optim.SGD, sgd, "fp32", False)
    for ddp_options in ({"gradient_as_bucket_view": True}, {"static_graph": True}):
        for inner in (default_hooks.allreduce_hook, torch_hooks.allreduce_hook):
            model, _ = train(rank, makers[0], inner, torch.optim.SGD, sgd, False, True, **ddp_options)
            torch.testing.assert_close(flat(model), expected, rtol=1e-5, atol=1e-6)


def step_a_shard_each(rank, recipe):
    """ZeRO's ordinary step, after backward(), with gradients that a wire has averaged."""
    ends = []
    for make in (torch.optim.AdamW, partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)):
        model = model_of()
        wire = gradwire.attach(model, recipe)
        before, optimizer = flat(model), make(model.parameters(), lr=0.01)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        wire.detach()
        assert_same_on_all_ranks(model)
        assert not torch.equal(flat(model), before)
        ends.append(flat(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("recipe", ["sign", "int4"])
def test_zero_steps_what_a_wire_has_averaged(two_ranks, recipe):
    two_ranks.run(step_a_shard_each, recipe)


@pytest.mark.parametrize("world_size", usually(2, otherwise=[4]))
def test_every_step_equals_ddp_with_a_local_optimizer(world_size):
    run_ranks(job_parity, world_size, timeout=120)


def job_checkpoint(rank):
    """ZeRO's own consolidated checkpoint is that of the ordinary optimizer, and loads before a first step."""
    options = {"lr": 0.01}
    model, zero = train(
        rank,
        hook_with_zero_step_interleaved,
        default_hooks.allreduce_hook,
        torch.optim.AdamW,
        options,
        True,
        True,
    )
    _, plain_state = expected_after(rank, torch.optim.AdamW, options, "fp32", True)
    zero.consolidate_state_dict(to=0)
    saved = [zero.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved)
    assert saved[0]["state"].keys() == plain_state["state"].keys()
    for index, state in plain_state["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(saved[0]["state"][index][key], value, rtol=1e-5, atol=1e-7)

    resumed = DistributedDataParallel(net())
    resumed.module.load_state_dict(model.module.state_dict())
    fresh = ZeroRedundancyOptimizer(
        groups(resumed.module), torch.optim.AdamW, overlap_with_ddp=True, **options
    )
    hook = hook_with_zero_step(default_hooks.allreduce_hook, resumed, fresh, shard_buckets=True)
    resumed.register_comm_hook(None, hook)
    fresh.load_state_dict(copy.deepcopy(saved[0]))  # on CPU, ZeRO's own copies are none
    for module in (model, resumed):
        module.zero_grad()
        loss_of(module, rank, 99).backward()
    torch.testing.assert_close(flat(resumed), flat(model), rtol=1e-5, atol=1e-7)


def job_refusals(rank):
    model = model_of()
    plain = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for make_hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
        with pytest.raises(ValueError, match="overlap_with_ddp=True"):
            make_hook(default_hooks.allreduce_hook, model, plain)
    alone = dist.new_group([rank], use_local_synchronization=True)
    other = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=alone, overlap_with_ddp=True, lr=0.1
    )
    with pytest.raises(ValueError, match="different process groups"):
        hook_with_zero_step(default_hooks.allreduce_hook, model, other)


def job_part_of_a_model(rank):
    """Buckets that hold nothing of ZeRO's are averaged, and nobody steps them."""
    model, plain = model_of(), model_of()
    weights, plain_weights = ([p for p in each.parameters() if p.dim() == 4] for each in (model, plain))
    zero = ZeroRedundancyOptimizer(weights, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    inner = default_hooks.allreduce_hook
    model.register_comm_hook(None, hook_with_zero_step_interleaved(inner, model, zero))
    optimizer = torch.optim.SGD(plain_weights, lr=0.1)
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each, rank, step).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), flat(plain), rtol=1e-5, atol=1e-7)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


def job_around(rank):
    ddp_zero_hook._BUCKET_BYTES = 2000
    job_checkpoint(rank)
    job_part_of_a_model(rank)
    job_refusals(rank)


def test_checkpoints_are_zeros_own_a_part_of_a_model_will_do_and_misuse_is_refused():
    run_ranks(job_around, 2)


def job_failure(rank):
    now = []

    def fails(state, bucket):
        if rank == 1 and now == [FAILING_STEP]:
            raise LookupError("nothing here")
        return default_hooks.allreduce_hook(state, bucket)

    def set_now(step):
        now[:] = [step]

    model = model_of()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    gradwire.attach(model, hook_with_zero_step_interleaved(fails, model, zero), state=dist.group.WORLD)
    before = train_until_it_fails(rank, model, set_now, "rank 1, step 2, bucket 0, hook .*LookupError")
    assert now[0] >= FAILING_STEP
    assert torch.equal(before, flat(model))


def test_an_error_of_the_inner_hook_stops_the_step_and_is_raised_on_all_ranks():
    run_ranks(job_failure, 2)
