"""Resumed runs and swaps on CUDA: bits stay the same, and nothing is lost.

`CHECKS` is run by tests/gpu/run.py.
"""

import io

import torch

import gradwire
from gradwire.testing import run_ranks
from tests.gpu.models import (
    NUM_STEPS,
    WITH_MEMORY,
    assert_nothing_lost,
    backward,
    gradients_of,
    group_of,
    held_back,
    model_of,
)


def make(group, device, spec):
    model = model_of(group, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gradwire.attach(model, spec)


def train(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def job_resume(rank, device="cuda"):
    """Stop a run and go on through a file, before and after DDP rebuilds its buckets."""
    group = group_of(rank, device)
    for spec in (*WITH_MEMORY, "schedule(0=int4:rounding=stochastic; 2=bf16; 4=sign:feedback=true)"):
        model, optimizer, wire = make(group, device, spec)
        files = []
        with wire:
            for step in range(NUM_STEPS):
                files.append(io.BytesIO())
                parts = [model.module.state_dict(), optimizer.state_dict(), wire.state_dict()]
                torch.save(parts, files[-1])
                train(model, optimizer, [step])
        whole = weights_of(model)
        for stopped_at, onto in ((1, device), (3, "cpu"), (5, device)):
            files[stopped_at].seek(0)
            saved = torch.load(files[stopped_at], map_location=onto, weights_only=True)
            model, optimizer, wire = make(group, device, spec)
            for part, state in zip((model.module, optimizer, wire), saved, strict=True):
                part.load_state_dict(state)
            with wire:
                train(model, optimizer, range(stopped_at, NUM_STEPS))
            assert torch.equal(weights_of(model), whole), (spec, stopped_at)


def job_swap(rank, device="cuda"):
    group = group_of(rank, device)
    swaps = {3: "fp32", 5: "sign:feedback=true"}
    scheduled = gradwire.schedule({0: "int4", 3: "fp32", 5: "int8:feedback=true"})
    low_rank = "powersgd:rank=1,start=0"
    for first, sequence in (("int4", swaps), (scheduled, {}), (low_rank, {4: "int4"}), ("noop", {0: "int4"})):
        plain, model, wanted, sent = model_of(group, device), model_of(group, device), [], []
        with gradwire.attach(model, first) as wire:
            for step in range(NUM_STEPS):
                if step in sequence:
                    wire.swap(sequence[step])
                for each, found in ((plain, wanted), (model, sent)):
                    backward(each, step)
                    found.append(gradients_of(each))
            assert_nothing_lost(first, wanted, sent, held_back(wire, wanted[0]))


CHECKS = {
    "trust resume": lambda: run_ranks(job_resume, 2, timeout=60),
    "trust swap": lambda: run_ranks(job_swap, 2, timeout=60),
}
