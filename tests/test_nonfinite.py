"""Gradients that are not finite."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp import StepChecks, attachment_of
from gradwire.ddp.nonfinite import NonfinitePolicy, _Copied
from tests.models import small_model


def backward(model, step, is_bad):
    model.zero_grad()
    torch.manual_seed(100 * dist.get_rank() + step)
    (model(torch.randn(4, 10)).square().mean() * (float("nan") if is_bad else 1.0)).backward()


class NoWait:
    def synchronize(self):
        pass


def test_the_last_step_on_cuda_is_told_of_when_the_wire_is_detached(caplog):
    policy = NonfinitePolicy("raise", None)
    policy._conclude(_Copied(6, ["bias", "weight"], torch.tensor([True, True]), NoWait()))
    policy._conclude(_Copied(7, ["bias", "weight"], torch.tensor([True, False]), NoWait()))
    StepChecks(policy).close()
    StepChecks(policy).close()
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.startswith("step 7: the averaged gradient of weight is not finite, on every rank")


class NoEnd:
    def synchronize(self):
        raise AssertionError("a device that waits for a rank that is gone never gets here")


def check_detach_after_a_failure(rank):
    wire = gradwire.attach(small_model(), "int4", on_nonfinite="raise")
    bridge = attachment_of(wire).bridge
    bridge.checks.policy._conclude(_Copied(6, ["weight"], torch.tensor([False]), NoEnd()))
    bridge.runner.fail(gradwire.WireError("a rank is gone"))
    wire.detach()


def test_after_a_failure_detach_does_not_wait_for_the_device(two_ranks):
    two_ranks.run(check_detach_after_a_failure)


def check_skipping(rank, attached):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = dist.group.WORLD if callable(attached) else None
    with gradwire.attach(model, attached, state=state, on_nonfinite="skip") as wire:
        for step in range(6):
            before = [p.detach().clone() for p in model.parameters()]
            is_bad = step in (2, 4)
            backward(model, step, is_bad and rank == 1)
            assert all((p.grad is None) == is_bad for p in model.parameters())
            optimizer.step()
            after = list(model.parameters())
            assert all(torch.equal(b, p) for b, p in zip(before, after, strict=True)) == is_bad
        assert wire.stats().num_skipped == 2
        with pytest.raises(ValueError, match="attached with on_nonfinite="):
            gradwire.overlap_optimizer(wire, lambda params: torch.optim.SGD(params, lr=0.1))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("attached", ["int4", "fp32", torch_hooks.allreduce_hook])
def test_a_step_that_is_not_finite_is_skipped_on_every_rank(attached, two_ranks):
    two_ranks.run(check_skipping, attached)


def check_raising(rank):
    model = small_model()
    with gradwire.attach(model, "int4", on_nonfinite="raise") as wire:
        backward(model, 0, False)
        with pytest.raises(
            FloatingPointError, match=r"step 1: the averaged gradient of 0.weight and \d more"
        ):
            backward(model, 1, rank == 1)
        backward(model, 2, False)  # the wire itself has not failed
        assert wire.failure is None


def test_a_step_that_is_not_finite_is_raised_for_on_every_rank(two_ranks):
    two_ranks.run(check_raising)


def check_refusals(rank):
    model = small_model()
    with pytest.raises(ValueError, match="'propagate', 'skip' or 'raise', not 'ignore'"):
        gradwire.attach(model, "int4", on_nonfinite="ignore")
    with pytest.raises(ValueError, match="ranks would not skip together"):
        gradwire.attach(model, "noop", on_nonfinite="skip")
    with pytest.raises(ValueError, match="on_nonfinite is propagate on"):
        gradwire.attach(model, "int4", on_nonfinite="skip" if rank else "propagate")


def test_a_policy_that_cannot_work_is_refused(two_ranks):
    two_ranks.run(check_refusals)


class Odd(nn.Module):
    """A model with gradients that are empty, beyond the range of fp32, or different by rank."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.large = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.own = nn.Parameter(torch.ones(3))

    def forward(self, own_factor):
        return self.empty.sum() + 1e60 * self.large.sum() + own_factor * self.own.sum()


def check_odd(rank):
    module = Odd()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own"])
    model = DistributedDataParallel(module)
    with gradwire.attach(model, "fp32", on_nonfinite="skip") as wire:
        model(float("inf") if rank == 0 else 1.0).backward()
        assert wire.stats().num_skipped == 0, "what is not averaged is no reason for one rank to skip alone"
        assert module.large.grad.tolist() == [1e60] * 3
        (model(1.0) * (float("nan") if rank == 0 else 1.0)).backward()
        assert wire.stats().num_skipped == 1
        assert all(p.grad is None for p in model.parameters())


def test_gradients_that_are_odd_but_finite_are_not_skipped(two_ranks):
    two_ranks.run(check_odd)
