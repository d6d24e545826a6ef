"""Runs that torchrun restarts after a rank has died: they end as if nothing had happened."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.lab import Lab
from tests.lab_machine import needs_lab

SCRIPT = """
import os, pathlib, signal, sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

FOLDER, NUM_STEPS, LAST = pathlib.Path(sys.argv[1]), 9, 5
dist.init_process_group("gloo")
rank, starts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    model = DistributedDataParallel(net, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gradwire.attach(model, "int4:rounding=stochastic")


def train(model, optimizer, step):
    torch.manual_seed(1000 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(5, 8)).square().mean().backward()
    optimizer.step()


model, optimizer, wire = make()
saved_steps = sorted(int(path.stem.split("-")[1]) for path in FOLDER.glob(f"rank{rank}-*.pt"))
first = torch.tensor(saved_steps[-1] if saved_steps else 0)
dist.all_reduce(first, dist.ReduceOp.MIN)  # the last step that every rank has saved
if first:
    weights, momentum, state = torch.load(FOLDER / f"rank{rank}-{first}.pt", weights_only=True)
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(momentum)
    wire.load_state_dict(state)
for step in range(int(first), NUM_STEPS):
    if (rank, step, starts) == (1, LAST, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, optimizer, step)
    saved = [model.module.state_dict(), optimizer.state_dict(), wire.state_dict()]
    path = FOLDER / f"rank{rank}-{step + 1}.pt"
    torch.save(saved, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)  # whole or not at all
wire.detach()

whole, optimizer, wire = make()
for step in range(NUM_STEPS):
    train(whole, optimizer, step)
wire.detach()
same = all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))
(FOLDER / f"result{rank}").write_text(f"{same}, from step {int(first)}, started again {starts} times")
dist.destroy_process_group()
"""

# torchrun's own store outlives a restart, and a rank may find there the address of a peer that is dead.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.full
def test_a_run_that_torchrun_starts_again_ends_as_one_that_was_not_disturbed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    source = Path(__file__).parent.parent / "src"
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    run = subprocess.Popen(
        [*torchrun, "--max-restarts", "1", "--monitor-interval", "0.1", str(script), str(tmp_path)],
        env={**os.environ, **NEW_STORE, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            run.terminate()  # it ends its ranks, which are in sessions of their own
            run.communicate(timeout=60)
    assert run.returncode == 0, errors[-4000:]
    for rank in range(2):
        result = (tmp_path / f"result{rank}").read_text()
        assert result == "True, from step 5, started again 1 times", errors[-4000:]


@pytest.mark.full
@needs_lab
def test_diloco_goes_on_when_a_worker_is_killed_and_another_joins(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    elastic = importlib.import_module("elastic")
    said = []
    with Lab(4, "10mbit") as lab:
        loss = elastic.train(lab, 120, elastic.disturb(120, said.append), said.append)
    events = [line for line in said if "worker" in line]
    assert [line.partition(" ")[0] for line in events] == ["begins", "step", "goes", "step", "goes"], said
    assert "with 3 workers" in events[2]
    assert "with 4 workers" in events[4]
    assert loss < 3.2, "5.5 at the start"
