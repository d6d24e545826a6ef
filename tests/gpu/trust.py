"""The promises of docs/reliability.md on CUDA: agreement, verification, policies, no waiting.

`CHECKS` is run by tests/gpu/run.py. Jobs take the device, so that their logic can be tried on a CPU.
"""

import math

import torch
import torch.distributed as dist

import gradwire
from gradwire.testing import run_ranks
from tests.corrupting import corrupting_hook, corrupting_recipe
from tests.gpu.models import (
    FAULTY_STEP,
    NUM_STEPS,
    WITH_MEMORY,
    assert_nothing_lost,
    backward,
    gradients_of,
    group_of,
    held_back,
    loss_of,
    model_of,
    raised_by,
)

# --- agreement ---


def job_agreement(rank, device="cuda"):
    group = group_of(rank, device)

    def refused(**changes):
        """Return what both ranks are told when rank 1 attaches something else."""
        options = {"recipe": "bf16", **(changes if rank == 1 else {})}
        text = raised_by(lambda: gradwire.attach(model_of(group, device), **options), ValueError)
        assert text.startswith(f"rank {rank}: ranks call gradwire.attach with different things: "), text
        return text.partition("things: ")[2]

    assert refused(recipe="int4") == "recipe is bf16 on rank(s) 0, int4 on rank(s) 1"
    assert refused(verify_every=5) == "verify_every is 0 on rank(s) 0, 5 on rank(s) 1"
    assert refused(on_nonfinite="skip") == "on_nonfinite is propagate on rank(s) 0, skip on rank(s) 1"

    model = model_of(group, device)
    with gradwire.attach(model, "fp32") as wire:
        text = raised_by(lambda: wire.swap("fp16" if rank == 1 else "int8"), ValueError)
        assert "call Wire.swap with different things: recipe is int8 on rank(s) 0, fp16 on" in text, text
        assert wire.recipe == gradwire.fp32()
        backward(model)

    # Without a rebuild, DDP leaves each rank the buckets that it was told to make.
    def averaging(state, bucket):
        flat = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(flat, group=group, async_op=True).get_future().then(lambda f: f.value()[0])

    for what in ("int8", "fp32", averaging):
        cap = 25 if rank == 1 else 0.001
        model = model_of(group, device, bucket_cap_mb=cap, find_unused_parameters=True)
        wire = gradwire.attach(model, what)
        text = raised_by(lambda model=model: backward(model))
        assert text.startswith(f"rank {rank}, step 0, bucket 0, hook "), text
        assert "ValueError: ranks do not agree: bucket 0 is shape (92,), float32 of 3 parameters on" in text
        assert "on rank(s) 0, shape (1322,), float32 of 6 parameters on rank(s) 1" in text, text
        wire.detach()


# --- gradients that are not the same ---


def job_verify(rank, device="cuda"):
    group = group_of(rank, device)
    for what in (corrupting_recipe(), corrupting_hook(group)):
        model = model_of(group, device)
        with gradwire.attach(model, what, verify_every=2) as wire:
            for step in range(FAULTY_STEP + 1):  # it is not looked at in step 3
                backward(model, step)
            backward(model, FAULTY_STEP + 1)  # the host does not wait for the device
            text = raised_by(lambda model=model: backward(model, FAULTY_STEP + 2))
            assert text.startswith(f"rank {rank}, step {FAULTY_STEP + 1}: the averaged gradient of 0."), text
            assert "is not the same on every rank: one on rank(s) 0, another on rank(s) 1." in text
            assert f"All were the same at step {FAULTY_STEP - 1}." in text
            assert wire.failure is None
            backward(model, FAULTY_STEP + 2)  # the wire goes on
    model = model_of(group, device)
    with gradwire.attach(model, "int4", verify_every=1):
        backward(model, 0)
        if rank == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1)[3] += 1
        backward(model, 1)
        text = raised_by(lambda model=model: backward(model, 2))
        assert text.startswith(f"rank {rank}, step 1: parameter 0.weight is not the same on every rank"), text
    for recipe in ("int4", "fp32", "powersgd"):
        model = model_of(group, device)
        with gradwire.attach(model, recipe, verify_every=1):
            for step in range(5):
                backward(model, step)


# --- gradients that are not finite, and losses that are scaled ---


def job_nonfinite(rank, device="cuda"):
    group = group_of(rank, device)
    for recipe in ("int4", "fp32"):
        model = model_of(group, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with gradwire.attach(model, recipe, on_nonfinite="skip") as wire:
            for step in range(6):
                is_bad = step in (2, 4)
                before = [p.detach().clone() for p in model.parameters()]
                backward(model, step, math.nan if is_bad and rank == 1 else 1.0)
                assert all((p.grad is None) == is_bad for p in model.parameters()), (recipe, step)
                optimizer.step()
                pairs = zip(before, model.parameters(), strict=True)
                assert all(torch.equal(b, p) for b, p in pairs) == is_bad, (recipe, step)
            assert wire.stats().num_skipped == 2

    model = model_of(group, device)
    with gradwire.attach(model, "int4", on_nonfinite="raise") as wire:
        backward(model, 0)
        if device == "cpu":
            text = raised_by(lambda: backward(model, 1, math.inf if rank == 1 else 1.0), FloatingPointError)
        else:  # where nobody waits for the device, it comes with the next step
            backward(model, 1, math.inf if rank == 1 else 1.0)
            text = raised_by(lambda: backward(model, 2), FloatingPointError)
        assert text.startswith("step 1: the averaged gradient of 0.weight and "), text
        assert wire.failure is None
        for step in (3, 4):
            backward(model, step)

    model = model_of(group, device)
    with gradwire.attach(model, "int4") as wire:
        for step in range(5):
            backward(model, step, math.inf if step == FAULTY_STEP and rank == 1 else 1.0)
            is_finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
            assert is_finite == (step != FAULTY_STEP), step
            held = held_back(wire, gradients_of(model))
            assert all(bool(value.isfinite().all()) for value in held.values()), step


def scaled_run(group, device, spec, scaler, bad_step=None):
    """Return for each step the gradients, what this rank holds back (both unscaled), and the scale."""
    model = model_of(group, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients, held, scales = [], [], []
    with gradwire.attach(model, spec, grad_scaler=scaler if scaler.is_enabled() else None) as wire:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            is_bad = step == bad_step and dist.get_rank() == 1
            scaler.scale(loss_of(model, step) * (math.inf if is_bad else 1.0)).backward()
            gradients.append({name: grad / scales[-1] for name, grad in gradients_of(model).items()})
            if scaler.is_enabled():
                scaler.step(optimizer)
                scaler.update()
            now = held_back(wire, gradients[-1])
            held.append({name: value / scales[-1] for name, value in now.items()})
    return gradients, held, scales


def job_scaler(rank, device="cuda"):
    group = group_of(rank, device)
    plain, wanted = model_of(group, device), []
    for step in range(NUM_STEPS):
        backward(plain, step)
        wanted.append(gradients_of(plain))

    def scaler_of():
        return torch.amp.GradScaler(device, init_scale=2.0**12, growth_interval=2)

    for spec in WITH_MEMORY:
        gradients, held, scales = scaled_run(group, device, spec, scaler_of())
        assert len(set(scales)) >= 3, scales
        assert_nothing_lost(spec, wanted, gradients, held[-1])
        # Scales are powers of two, so a run with them is one without, bit for bit.
        off = torch.amp.GradScaler(device, enabled=False)
        unscaled, plain_held, _ = scaled_run(group, device, spec, off)
        for step in range(NUM_STEPS):
            for name in wanted[0]:
                assert torch.equal(gradients[step][name], unscaled[step][name]), (spec, step, name)
                assert torch.equal(held[step][name], plain_held[step][name]), (spec, step, name)

        gradients, held, scales = scaled_run(group, device, spec, scaler_of(), bad_step=4)
        assert scales[5] == scales[4] / 2, "the scaler has seen it on every rank"
        finite = [all(bool(value.isfinite().all()) for value in each.values()) for each in gradients]
        assert finite == [step != 4 for step in range(NUM_STEPS)], (spec, finite)
        since = {name: value - held[4][name] for name, value in held[-1].items()}
        assert_nothing_lost(spec, wanted[5:], gradients[5:], since)


# --- no waiting for the device ---


def job_no_waiting(rank, specs, on_nonfinite="propagate", device="cuda"):
    """Train with synchronisation as an error: no backward pass may wait for the device."""
    group = group_of(rank, device)
    for spec in specs:
        model = model_of(group, device)
        scaler = torch.amp.GradScaler(device) if spec.endswith(" scaled") else None
        recipe = spec.removesuffix(" scaled")
        with gradwire.attach(model, recipe, grad_scaler=scaler, on_nonfinite=on_nonfinite):
            for step in range(6):
                model.zero_grad()
                loss = loss_of(model, step) if scaler is None else scaler.scale(loss_of(model, step))
                if device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
                loss.backward()
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
                assert all(bool(p.grad.isfinite().all()) for p in model.parameters()), (spec, step)


NOT_WAITING = ("fp32", "bf16", "int8", "int4", "sign", "sign:feedback=true", "int4 scaled")

CHECKS = {
    "trust agreement": lambda: run_ranks(job_agreement, 2, timeout=60),
    "trust verify_every": lambda: run_ranks(job_verify, 2, timeout=60),
    "trust on_nonfinite": lambda: run_ranks(job_nonfinite, 2, timeout=60),
    "trust grad_scaler": lambda: run_ranks(job_scaler, 2, timeout=60),
    "trust no waiting": lambda: run_ranks(job_no_waiting, 2, timeout=60, args=(NOT_WAITING,)),
    "trust no waiting to raise": lambda: run_ranks(job_no_waiting, 2, timeout=60, args=(("int4",), "raise")),
}
