"""Recorded exchanges on CUDA: they end with the bits of exchanges that are not recorded.

`CHECKS` is run by tests/gpu/run.py.
"""

import os
from unittest import mock

import torch

import gradwire
from gradwire.lanes import recordings
from gradwire.testing import run_ranks
from tests.gpu.models import backward, group_of, model_of

NUM_STEPS = 16
SPECS = (
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int4:residual=bf16",
    "sign",
    "sign:rotated=false",
    "int4:rotated=true",
    "int3",
    "int2",
    "int2:bits=1+2",
    "powersgd:rank=1",
    "powersgd:rank=2,factors=int4",
    "powersgd:rank=8,factors=int8+int4",
    "acp:rank=1",
    "schedule(0=int4; 5=int2; 10=int4)",
    "route(*bias=fp32; *=int4)",
)


class Replays:
    """Counts replays inside a ``with`` block."""

    def __enter__(self):
        self.number = 0
        replay = recordings._Recording.replay

        def counted(recording, *arguments):
            self.number += 1
            replay(recording, *arguments)

        self._patch = mock.patch.object(recordings._Recording, "replay", counted)
        self._patch.start()
        return self

    def __exit__(self, *error):
        self._patch.stop()


def run(group, spec, *, record, disturb=lambda step, wire: None, factor=lambda step: 1.0, **options):
    """Train for some steps; return the gradients of each, and the number of replays."""
    os.environ["GRADWIRE_CUDA_GRAPHS"] = str(int(record))
    model = model_of(group, "cuda", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    with Replays() as replays, gradwire.attach(model, spec) as wire:
        for step in range(NUM_STEPS):
            disturb(step, wire)
            backward(model, step, factor(step))
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
            if gradients[-1].isfinite().all():
                optimizer.step()
        traffic = [bucket.bytes_sent for bucket in wire.stats().steps[-1].buckets]
    return gradients, traffic, replays.number


def assert_same(group, spec, *, least_replays, **options):
    expected, expected_traffic, none = run(group, spec, record=False, **options)
    actual, traffic, number = run(group, spec, record=True, **options)
    assert none == 0, spec
    assert number >= least_replays, (spec, number)
    assert traffic == expected_traffic, spec
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), (spec, step)
    assert expected[-1].abs().max() > 0
    return number


def job_bits(rank):
    group = group_of(rank, "cuda")
    numbers = [assert_same(group, spec, least_replays=2) for spec in SPECS]
    assert_same(group, "int4", least_replays=2, find_unused_parameters=True)
    assert_same(group, "int4", least_replays=2, gradient_as_bucket_view=True)
    assert_same(group, "topk", least_replays=0)
    assert_same(group, "int4:rounding=stochastic", least_replays=0)
    return numbers


def job_changes(rank):
    """Swap, load a state, and meet infinite gradients in the middle of recorded steps."""
    group = group_of(rank, "cuda")
    saved = {}

    def swap(step, wire):
        if step in (6, 11):
            wire.swap("sign:feedback=true" if step == 6 else "int4")

    def load(step, wire):
        if step == 4:
            saved["state"] = wire.state_dict()
        if step == 7:
            wire.load_state_dict(saved["state"])

    def infinite(step):
        return float("inf") if step in (2, 6) else 1.0

    for spec in ("int4", "powersgd:rank=1", "int2"):
        assert_same(group, spec, least_replays=2, disturb=load)
        assert_same(group, spec, least_replays=2, factor=infinite)
    assert_same(group, "int4", least_replays=2, disturb=swap)


def job_two_models(rank):
    """Two models take turns on one group: each has recordings of its own."""
    group = group_of(rank, "cuda")
    results = {}
    for record in (False, True):
        os.environ["GRADWIRE_CUDA_GRAPHS"] = str(int(record))
        models = [model_of(group, "cuda") for _ in range(2)]
        wires = [gradwire.attach(model, spec) for model, spec in zip(models, ("int4", "int2"), strict=True)]
        for step in range(NUM_STEPS):
            for model in models:
                backward(model, step)
        gradients = [p.grad.clone() for model in models for p in model.parameters()]
        results[record] = gradients
        for wire in wires:
            wire.detach()
    for a, b in zip(results[False], results[True], strict=True):
        assert torch.equal(a, b)


def job_end(rank):
    """Destroy the group while recordings exist: nothing hangs."""
    group = group_of(rank, "cuda")
    os.environ["GRADWIRE_CUDA_GRAPHS"] = "1"
    model = model_of(group, "cuda")
    gradwire.attach(model, "int4")
    for step in range(NUM_STEPS):
        backward(model, step)
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group(group)


CHECKS = {
    "recordings have the same bits": lambda: run_ranks(job_bits, 2, timeout=240),
    "recordings and changes": lambda: run_ranks(job_changes, 2, timeout=120),
    "recordings of two models": lambda: run_ranks(job_two_models, 2, timeout=120),
    "recordings when a group ends": lambda: run_ranks(job_end, 2, timeout=120),
}
