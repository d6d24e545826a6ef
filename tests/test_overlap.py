"""Optimizer steps during backward: what they equal, and what is refused."""

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import default_hooks
from gradwire.ddp_comm_hooks.optimizer_overlap_hooks import (
    _apply_optim_in_backward_hook,
    _hook_then_optimizer,
    _OptimizerHookState,
)
from gradwire.testing import run_ranks
from tests.local_runs import assert_same_on_all_ranks, flat, loss_of, net
from tests.overlap_runs import FAILING_STEP, groups, model_of, train_until_it_fails
from tests.sizes import usually

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adam, one by one": lambda params: torch.optim.Adam(params, lr=0.01, foreach=False),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


def train(rank, recipe, make, overlap, with_groups, accumulate=1, **options):
    model = model_of(**options)
    wire = gradwire.attach(model, recipe)

    def factory(params):
        return make(groups(model.module) if with_groups else params)

    if overlap:
        optimizer = gradwire.overlap_optimizer(wire, factory)
    else:
        optimizer = factory([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(accumulate - 1):
            with model.no_sync():
                loss_of(model, rank, 50 + micro + step).backward()
        before = flat(model)
        loss_of(model, rank, step).backward()
        assert torch.equal(before, flat(model)) == (not overlap)
        optimizer.step()
        scheduler.step()
    assert_same_on_all_ranks(model)
    state = optimizer.state_dict()
    wire.detach()
    return flat(model), state


def job_parity(rank):
    for name, make in OPTIMIZERS.items():
        for recipe in ("fp32", "bf16"):
            plain, plain_state = train(rank, recipe, make, overlap=False, with_groups=True)
            ours, our_state = train(rank, recipe, make, overlap=True, with_groups=True)
            if name == "SGD":
                assert torch.equal(ours, plain)
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7, msg=name)
            assert our_state["param_groups"] == plain_state["param_groups"]
            assert our_state["state"].keys() == plain_state["state"].keys()
    make = OPTIMIZERS["SGD"]
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"accumulate": 3}):
        plain, _ = train(rank, "fp32", make, overlap=False, with_groups=False, **options)
        ours, _ = train(rank, "fp32", make, overlap=True, with_groups=False, **options)
        assert torch.equal(ours, plain), options


@pytest.mark.parametrize("world_size", usually(2, otherwise=[4]))
def test_overlapped_steps_equal_the_plain_loop(world_size):
    run_ranks(job_parity, world_size)


def job_detach_before_step(rank):
    """The step that a backward pass has taken is not taken again, and the next one is."""
    model = model_of()
    with gradwire.attach(model, "fp32") as wire:
        optimizer = gradwire.overlap_optimizer(wire, OPTIMIZERS["SGD"])
        loss_of(model, rank, 0).backward()
        taken = flat(model)
    optimizer.step()
    assert torch.equal(flat(model), taken)
    optimizer.step()
    assert not torch.equal(flat(model), taken), "gradients are used again only if the program says so"
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    before = flat(model)
    optimizer.step()
    assert not torch.equal(flat(model), before)
    assert_same_on_all_ranks(model)


def job_checkpoint_and_detach(rank):
    """A state saved with overlap goes on without it, and back; a detached wire steps as usual."""
    make = OPTIMIZERS["AdamW"]
    model = model_of()
    wire = gradwire.attach(model, "fp32")
    optimizer = gradwire.overlap_optimizer(wire, make)
    reference = copy.deepcopy(model.module)
    plain = DistributedDataParallel(reference, bucket_cap_mb=0.001)
    plain_optimizer = make(list(reference.parameters()))
    for step in range(6):
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(plain_optimizer.state_dict())
            plain_optimizer.load_state_dict(state)
        if step == 4:
            wire.detach()
        for module, stepper in ((model, optimizer), (plain, plain_optimizer)):
            stepper.zero_grad()
            loss_of(module, rank, step).backward()
            stepper.step()
        torch.testing.assert_close(flat(model), flat(plain), rtol=1e-5, atol=1e-6)


def job_join(rank):
    """A rank without input keeps stepping with the others, so all end the same."""
    model = model_of()
    with gradwire.attach(model, "fp32") as wire:
        optimizer = gradwire.overlap_optimizer(wire, OPTIMIZERS["SGD"])
        with model.join():
            for step in range(3 + rank):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
    assert_same_on_all_ranks(model)


def job_around(rank):
    job_checkpoint_and_detach(rank)
    job_detach_before_step(rank)
    job_join(rank)


def test_checkpoints_detaching_and_join():
    run_ranks(job_around, 2)


# --- what cannot be right ---


def job_refusals(rank):
    make = OPTIMIZERS["SGD"]

    def fresh(**options):
        model = model_of(**options)
        return model, gradwire.attach(model, "fp32")

    model, wire = fresh()
    with pytest.raises(TypeError, match="must make a torch.optim.Optimizer, not list"):
        gradwire.overlap_optimizer(wire, lambda params: params)
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        gradwire.overlap_optimizer(wire, torch.optim.LBFGS)
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        gradwire.overlap_optimizer(wire, lambda params: make(list(net().parameters())))
    optimizer = gradwire.overlap_optimizer(wire, make)
    with pytest.raises(ValueError, match="steps an optimizer already"):
        gradwire.overlap_optimizer(wire, make)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        optimizer.add_param_group({"params": net().parameters()})
    assert len(optimizer.param_groups) == 1, "what is refused is not there"
    weights, biases = groups((other := fresh())[0].module)
    some = gradwire.overlap_optimizer(other[1], lambda params: make([weights]))
    some.add_param_group(biases)
    assert len(some.param_groups) == 2
    _, wire = fresh(find_unused_parameters=True)
    with pytest.raises(ValueError, match="find_unused_parameters"):
        gradwire.overlap_optimizer(wire, make)

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, rank, 0)).backward()
    with pytest.raises(RuntimeError, match="a GradScaler cannot be used with overlap_optimizer"):
        scaler.step(optimizer)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    disabled.scale(loss_of(model, rank, 0)).backward()
    disabled.step(optimizer)

    for act in (optimizer.step, optimizer.zero_grad):
        loss_of(model, rank, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        with pytest.raises(RuntimeError, match="clipping by the global norm, for one"):
            act()
        optimizer.zero_grad()

    partly = DistributedDataParallel(
        nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)}), static_graph=True
    )
    partly.module.forward = lambda x: partly.module["used"](x)
    wire = gradwire.attach(partly, "fp32")
    gradwire.overlap_optimizer(wire, make)
    with pytest.raises(ValueError, match="parameter unused.* got no gradient in this step"):
        partly(torch.ones(1, 2)).sum().backward()


def test_what_cannot_be_right_is_refused_with_the_reason():
    run_ranks(job_refusals, 2)


class Broken(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.now = 0

    def step(self, closure=None):
        if self.now == FAILING_STEP:
            raise ArithmeticError("no step today")
        return super().step(closure)


def job_failed_averaging(rank):
    now = []

    def fails_late(state, bucket):
        fails = rank == 1 and now == [FAILING_STEP] and bucket.index() == 0
        future = torch_hooks.allreduce_hook(state, bucket)
        return future.then(lambda done: 1 / 0 if fails else done.value())

    def set_now(step):
        now[:] = [step]

    model = model_of()
    with gradwire.attach(model, fails_late) as wire:
        optimizer = gradwire.overlap_optimizer(wire, OPTIMIZERS["SGD"])
        place = f"rank 1, step {FAILING_STEP}, bucket 0, hook .*fails_late: ZeroDivisionError"
        before = train_until_it_fails(rank, model, set_now, place, optimizer)
        if rank == 1:
            assert now == [FAILING_STEP]
            # Bucket 0 holds the last parameters, whose gradients come first.
            last = list(model.module.parameters())[-1]
            assert torch.equal(before[-last.numel() :], flat(model)[-last.numel() :])


def job_failed_step(rank):
    model = model_of()
    wire = gradwire.attach(model, "fp32")
    optimizer = gradwire.overlap_optimizer(
        wire, lambda params: (Broken if rank == 1 else torch.optim.SGD)(params, lr=0.1)
    )

    def tell(step):
        optimizer.optimizer.now = step

    place = f"rank 1, step {FAILING_STEP}, bucket 0, hook fp32: ArithmeticError: no step today"
    train_until_it_fails(rank, model, tell, place, optimizer)
    kind = ArithmeticError if rank == 1 else gradwire.PeerError
    with pytest.raises(kind):
        loss_of(model, rank, 0).backward()


def test_a_failed_averaging_is_not_stepped_with():
    run_ranks(job_failed_averaging, 2)


def test_a_step_that_fails_on_one_rank_ends_training_on_all():
    run_ranks(job_failed_step, 2)


# --- torch's names ---


def plain_sgd(rank, num_steps=4, **options):
    model = model_of(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return flat(model)


def doubling(state, bucket):
    """Returns a tensor that is not the bucket's own."""
    return torch_hooks.allreduce_hook(state, bucket).then(lambda done: done.value() * 2.0)


def functional_sgd(model, **options):
    return _FunctionalSGD(list(model.parameters()), lr=0.1, momentum=0.9, **options)


def job_torch_names(rank):
    expected = plain_sgd(rank)
    for hook in (torch_hooks.allreduce_hook, default_hooks.allreduce_hook):
        for via_attach in (False, True):
            model = model_of()
            state = _OptimizerHookState.from_functional_optim(functional_sgd(model))
            wrapped = _hook_then_optimizer(hook, state)
            if via_attach:
                gradwire.attach(model, wrapped, state=dist.group.WORLD)
            else:
                model.register_comm_hook(None, wrapped)
            for step in range(4):
                model.zero_grad()
                loss_of(model, rank, step).backward()
            torch.testing.assert_close(flat(model), expected, rtol=1e-5, atol=1e-6)

    # The result counts, not the bucket, and only for the parameters that were named.
    model, reference = model_of(), model_of()
    first = next(model.module.parameters())
    state = _OptimizerHookState(_FunctionalSGD([first], lr=0.1), params=[first])
    model.register_comm_hook(None, _hook_then_optimizer(doubling, state))
    before = flat(model)
    for module in (model, reference):
        loss_of(module, rank, 0).backward()
    gradient = next(reference.module.parameters()).grad
    torch.testing.assert_close(first.detach().flatten(), (before[: first.numel()] - 0.2 * gradient.flatten()))
    assert torch.equal(flat(model)[first.numel() :], before[first.numel() :])

    with pytest.raises(ValueError, match="step_param"):
        _OptimizerHookState(object())

    # An inner error stops the step, and is raised as what it is.
    def fails(state, bucket):
        return torch_hooks.allreduce_hook(state, bucket).then(lambda done: {}["gone"])

    model = model_of()
    model.register_comm_hook(None, _hook_then_optimizer(fails, _OptimizerHookState(functional_sgd(model))))
    before = flat(model)
    with pytest.raises(gradwire.WireError, match="hook .*fails: KeyError: .*gone"):
        loss_of(model, rank, 0).backward()
    assert torch.equal(before, flat(model))


def job_in_backward(rank):
    for view in (False, True):
        expected = plain_sgd(rank, gradient_as_bucket_view=view)
        model = model_of(gradient_as_bucket_view=view)
        _apply_optimizer_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 0.1, "momentum": 0.9})
        with pytest.raises(ValueError, match="use gradwire.overlap_optimizer"):
            gradwire.attach(model, "fp32")
        hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=view)
        gradwire.attach(model, hook, state=weakref.ref(model))
        for step in range(4):
            loss_of(model, rank, step).backward()
            assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(flat(model), expected, rtol=1e-5, atol=1e-6)


def job_torch_face(rank):
    job_torch_names(rank)
    job_in_backward(rank)


@pytest.mark.parametrize("world_size", usually(2, otherwise=[4]))
def test_torchs_overlap_hooks_equal_the_plain_loop_on_cpu(world_size):
    run_ranks(job_torch_face, world_size)
