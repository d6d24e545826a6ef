"""torch's post-local SGD: our hook with torch's averagers and optimizer."""

import copy
import io
import pickle
import socket

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_module
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from gradwire.testing import check_hook, run_ranks
from tests.local_runs import flat, loss_of, net
from tests.models import small_model


def job_post_local(rank):
    """Averaged in the world for two steps, then in each half alone, then not at all."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for with_subgroup in (True, False):
        local = copy.deepcopy(net())
        model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
        state = PostLocalSGDState(None, halves[rank // 2], 2, post_local_gradient_allreduce=with_subgroup)
        assert isinstance(state, torch_module.PostLocalSGDState), "what Lightning asks"
        model.register_comm_hook(state, post_localSGD_hook)
        for step in range(4):
            for module in (model, local):
                module.zero_grad()
                loss_of(module, rank, step).backward()
            for p, q in zip(model.module.parameters(), local.parameters(), strict=True):
                expected = q.grad.clone()
                if step < 2:
                    dist.all_reduce(expected)
                    expected /= 4
                elif with_subgroup:
                    dist.all_reduce(expected, group=halves[rank // 2])
                    expected /= 2
                torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-8)
        assert state.iter == 2


def test_post_local_sgd_averages_globally_then_in_the_subgroup():
    run_ranks(job_post_local, 4)


def job_machines(rank):
    """Without a subgroup, ranks that run on one machine form one; here two machines of two ranks."""
    machine = rank // 2
    socket.gethostname = lambda: f"machine{machine}"
    model = small_model()
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=0)
    with gradwire.attach(model, post_localSGD_hook, state=state):
        model(torch.full((1, 10), float(rank))).sum().backward()
    assert dist.get_process_group_ranks(state.subgroup) == [2 * machine, 2 * machine + 1]
    dist.new_group([0, 1, 2, 3])  # world-wide calls still meet
    dist.barrier()


def test_without_a_subgroup_the_ranks_of_a_machine_form_one():
    run_ranks(job_machines, 4)


def averaging_within_the_group(group):
    return PostLocalSGDState(group, group, start_localSGD_iter=2)


def test_post_local_sgd_keeps_the_contract():
    report = check_hook(
        post_localSGD_hook, averaging_within_the_group, tolerance=1e-6, world_size=3, num_roundings=1
    )
    assert report.ok, report


def train_with_torchs_halves(rank, state_class, hook, averager):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    subgroup = dist.new_group([rank], use_local_synchronization=True)
    model.register_comm_hook(state_class(None, subgroup, 3), hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager())
    for step in range(9):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return flat(model)


def job_averagers(rank):
    size = dist.get_world_size()
    makers = {
        "periodic": lambda: PeriodicModelAverager(period=2, warmup_steps=3),
        "hierarchical": lambda: HierarchicalModelAverager({2: 2, 4: size}, warmup_steps=3),
    }
    for name, averager in makers.items():
        ours = train_with_torchs_halves(rank, PostLocalSGDState, post_localSGD_hook, averager)
        theirs = train_with_torchs_halves(
            rank, torch_module.PostLocalSGDState, torch_module.post_localSGD_hook, averager
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=name)


def test_torchs_averagers_and_optimizer_work_with_it_as_with_torchs_own():
    run_ranks(job_averagers, 4)


def job_pickling(rank):
    state = PostLocalSGDState(dist.group.WORLD, dist.new_group(), 7, post_local_gradient_allreduce=False)
    state.iter = 5
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    for restored in (pickle.loads(pickle.dumps(state)), torch.load(saved)):
        assert isinstance(restored, PostLocalSGDState)
        assert (restored.iter, restored.start_localSGD_iter) == (5, 7)
        assert restored.post_local_gradient_allreduce is False
        assert restored.process_group is None
        assert restored.subgroup is None
        model = small_model()
        model.register_comm_hook(restored, post_localSGD_hook)
        model(torch.ones(1, 10)).sum().backward()
        assert restored.iter == 6


def test_a_state_pickles_without_its_groups_and_goes_on():
    run_ranks(job_pickling, 2)
