"""The promises of docs/telemetry.md on CUDA: figures, events, and ranges in a profiler's trace.

`CHECKS` is run by tests/gpu/run.py.
"""

import json
import math
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import gradwire
from gradwire.testing import run_ranks
from tests.gpu.models import backward, gradients_of, group_of, held_back, model_of


def is_near(found, expected, relative=1e-4, absolute=1e-6):
    return math.isclose(found, float(expected), rel_tol=relative, abs_tol=absolute)


def job_telemetry(rank, folder, device="cuda"):
    group, file = group_of(rank, device), Path(folder) / f"rank{rank}.jsonl"
    plain, model, unobserved = (model_of(group, device) for _ in range(3))
    telemetry = gradwire.Telemetry(every=3, jsonl=f"{folder}/rank{{rank}}.jsonl")
    with (
        gradwire.attach(model, "int4", telemetry=telemetry) as wire,
        gradwire.attach(unobserved, "int4") as silent,
    ):
        for step in range(5):
            for each in (plain, model, unobserved):
                backward(each, step)
            exact, given, alone = (gradients_of(each) for each in (plain, model, unobserved))
            assert all(torch.equal(given[name], alone[name]) for name in given), "looking changes nothing"
            if step % 3:
                continue
            held = held_back(wire, given)
            found = {each.name: each for each in wire.stats().parameters}
            for name, own in found.items():
                error = (given[name] - exact[name]).norm() / exact[name].norm()
                cosine = torch.cosine_similarity(given[name].flatten(), exact[name].flatten(), 0)
                assert is_near(own.relative_error, error), (name, own, error)
                assert is_near(own.cosine, cosine, absolute=1e-4), (name, own, cosine)
                assert is_near(own.gradient_norm, exact[name].norm()), (name, own)
                assert is_near(own.residual_norm, held[name].norm()), (name, own)
            assert found.keys() == given.keys()
        # Buckets that share a message begin at multiples of 64 bytes in it; measured steps share none.
        padding = silent.stats().bytes_sent - wire.stats().bytes_sent
        assert 0 <= padding < 64 * 2 * 5 * len(wire.stats().steps[-1].buckets), padding
        wire.swap("bf16")
        backward(model, 5)
    told = [json.loads(line) for line in file.read_text().splitlines()]
    happened = ["attach 0", "step 0", "rebuild 1", "step 3", "swap 5", "detach 6"]
    assert [f"{event['event']} {event['step']}" for event in told] == happened, told
    assert all(event["rank"] == rank for event in told)
    figures = told[3]["parameters"]
    assert all(figures[name]["relative_error"] == own.relative_error for name, own in found.items())

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with gradwire.attach(model, "int4"):
        for step in range(3):
            backward(model, step)
        with profile(activities=activities) as seen:
            backward(model, 3)
            if device == "cuda":
                torch.cuda.synchronize()
    names = {event.name for event in seen.events()}
    num_buckets = len({name for name in names if name.startswith("gradwire::int4 bucket ")})
    assert num_buckets >= 2, sorted(names)
    with gradwire.attach(model, "int4"):
        backward(model)  # and no range is left open
    num_kernels = sum(str(event.device_type).endswith("CUDA") for event in seen.events())
    return f"{num_buckets} ranges, {num_kernels} events of the device"


def check_telemetry(device="cuda"):
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(job_telemetry, 2, timeout=60, args=(folder, device))


CHECKS = {"trust telemetry": check_telemetry}
