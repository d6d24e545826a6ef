"""Residuals follow the scale of a loss."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

import gradwire
from tests.models import small_model

# Every recipe with a memory.
SPECS = [
    "int4",
    "int4:rounding=stochastic",
    "int8:feedback=true,residual=bf16",
    "fp8:feedback=true",
    "sign:feedback=true",
    "powersgd:rank=1",
    "acp:rank=2",
    "route(ndim<2=fp32; *=int4)",
]
NUM_STEPS, BAD_STEP = 9, 4


def make(spec, scaler):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wire = gradwire.attach(model, spec, grad_scaler=scaler if scaler.is_enabled() else None)
    return model, optimizer, wire


def unscaled_run(spec, scaler, bad_ranks, resume_at=None):
    """Return for each step the gradients, what this rank holds back (both unscaled), and the scale."""
    model, optimizer, wire = make(spec, scaler)
    rank, gradients, held, scales = dist.get_rank(), [], [], []
    for step in range(NUM_STEPS):
        if step == resume_at:
            saved = wire.state_dict()
            wire.detach()
            model, optimizer, wire = make(spec, scaler)
            wire.load_state_dict(saved)
        optimizer.zero_grad()
        torch.manual_seed(100 * rank + step)
        loss = model(torch.randn(4, 10)).square().mean()
        scales.append(scaler.get_scale())
        is_bad = step == BAD_STEP and rank in bad_ranks
        scaler.scale(loss * (float("inf") if is_bad else 1.0)).backward()
        gradients.append({n: p.grad.clone() / scales[-1] for n, p in model.module.named_parameters()})
        if scaler.is_enabled():  # else nobody skips the bad step
            scaler.step(optimizer)
            scaler.update()
        (memory,) = wire.state_dict()["memory"].values()
        held.append({n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.module.named_parameters()})
        for key, tensors in memory.items():
            if key.startswith("residual:"):
                held[-1].update((name, tensor.double() / scales[-1]) for name, tensor in tensors.items())
    wire.detach()
    return gradients, held, scales


def means():
    """Return what plain averaging gives in each step."""
    model, found = small_model(), []
    for step in range(NUM_STEPS):
        model.zero_grad()
        torch.manual_seed(100 * dist.get_rank() + step)
        model(torch.randn(4, 10)).square().mean().backward()
        found.append({name: p.grad.double() for name, p in model.module.named_parameters()})
    return found


def check_law(spec, steps, wanted, gradients, held, before):
    """Check that in these steps gradients came out or are held back in addition to what was."""
    for name in wanted[0]:
        left = held[steps[-1]][name] - before[name]
        dist.all_reduce(left)
        total, sent = (sum(each[step][name].double() for step in steps) for each in (wanted, gradients))
        error = (sent + left / dist.get_world_size() - total).abs().max() / total.abs().max()
        assert error < (0.02 if "bf16" in spec else 1e-5), (spec, steps, name, error)


def fresh_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)


BEFORE, AFTER = list(range(BAD_STEP)), list(range(BAD_STEP + 1, NUM_STEPS))


def check_scales(rank, spec):
    wanted = means()
    nothing = {name: torch.zeros_like(value) for name, value in wanted[0].items()}
    gradients, held, scales = unscaled_run(spec, fresh_scaler(), bad_ranks=[1])
    assert len(set(scales)) >= 3, "it has grown"
    assert scales[BAD_STEP + 1] == scales[BAD_STEP] / 2, "and shrunk"
    check_law(spec, BEFORE, wanted, gradients, held, nothing)
    check_law(spec, AFTER, wanted, gradients, held, held[BAD_STEP])

    # Scales are powers of two, so a run with them is one without, bit for bit.
    off = torch.amp.GradScaler("cpu", enabled=False)
    plain_gradients, plain_held, _ = unscaled_run(spec, off, bad_ranks=[1])
    for step in range(NUM_STEPS):
        for name, value in plain_held[step].items():
            assert torch.equal(held[step][name], value), (step, name)
            assert step == BAD_STEP or torch.equal(gradients[step][name], plain_gradients[step][name])


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_lost_when_the_scale_of_the_loss_changes(spec, two_ranks):
    two_ranks.run(check_scales, spec)


def check_resumed(rank, spec):
    wanted = means()
    nothing = {name: torch.zeros_like(value) for name, value in wanted[0].items()}
    gradients, held, _ = unscaled_run(spec, fresh_scaler(), bad_ranks=[0, 1], resume_at=BAD_STEP + 1)
    check_law(spec, BEFORE + AFTER, wanted, gradients, held, nothing)


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_lost_by_resuming_at_another_scale_after_a_step_that_is_infinite(spec, two_ranks):
    two_ranks.run(check_resumed, spec)


def check_refusals(rank):
    model = small_model()
    with pytest.raises(TypeError, match="must be a torch.amp.GradScaler, not float"):
        gradwire.attach(model, "int4", grad_scaler=2.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(ValueError, match="leave on_nonfinite='skip' out"):
        gradwire.attach(model, "int4", grad_scaler=scaler, on_nonfinite="skip")
    with pytest.raises(TypeError, match="goes with a recipe"):
        gradwire.attach(model, torch_hooks.allreduce_hook, grad_scaler=scaler)
    with pytest.raises(ValueError, match="grad_scaler is not given on rank\\(s\\) 0, given"):
        gradwire.attach(model, "int4", grad_scaler=scaler if rank else None)


def test_a_scaler_that_cannot_work_is_refused(two_ranks):
    two_ranks.run(check_refusals)


def check_state_without_a_scaler(rank):
    def held(wire):
        (memory,) = wire.state_dict()["memory"].values()
        return memory["residual:float32"]["0.weight"]

    model, scaler = small_model(), torch.amp.GradScaler("cpu", init_scale=4.0)
    with gradwire.attach(model, "int4", grad_scaler=scaler) as wire:
        scaler.scale(model(torch.randn(4, 10)).square().mean()).backward()
        saved, before = wire.state_dict(), held(wire)
    assert saved["loss_scale"] == 4.0
    with gradwire.attach(model, "int4") as wire:  # whose losses are not scaled
        wire.load_state_dict(saved)
        assert torch.equal(held(wire), before / 4)
        assert wire.state_dict()["loss_scale"] is None


def test_a_state_is_unscaled_for_a_wire_without_a_scaler(two_ranks):
    two_ranks.run(check_state_without_a_scaler)
