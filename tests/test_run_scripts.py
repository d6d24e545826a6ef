"""`gradwire run` with scripts that log, are interrupted, start ranks themselves, or train a module."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.processes import wait_until_gone

BEGIN = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
"""
TRAIN = """
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(40, 5))
trained = model.module if "module" in sys.argv else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    loss = trained(torch.full((2, 40), float("nan") if step == 1 and "nan" in sys.argv else 1.0))
    optimizer.zero_grad()
    loss.square().mean().backward()
    optimizer.step()
print("finite " + str(all(p.isfinite().all() for p in model.parameters())))
"""
SHARDED = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(2, 64)).square().mean().backward()
    optimizer.step()
torch.save(model.state_dict(), f"rank{dist.get_rank()}.pt")
dist.destroy_process_group()
"""
LOGGING = """
import logging, warnings
logging.basicConfig(filename=sys.argv[1], level=logging.INFO, format="own %(message)s")
logging.getLogger("mine").info("a line")
logging.getLogger("gradwire").warning("a warning")
"""
SPAWNING = """
import torch.multiprocessing
def work(index):
    print(f"worker {index}")
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""
LAUNCHER = """
import os, socket, subprocess, sys
import torch.distributed as dist

def start(size):
    if "LOCAL_RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ.update(LOCAL_RANK="0", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(1, size):
            subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": str(rank)})
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=size)
"""
TRAINED = """
model = DistributedDataParallel(torch.nn.Linear(40, 5))
for step in range(3):
    model(torch.ones(2, 40)).square().mean().backward()
print("attached " + str(bool(model._get_ddp_logging_data().get("comm_hook"))) + "\\n", end="", flush=True)
dist.barrier()
"""
SPAWNED = """
import torch.multiprocessing
def work(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(40, 5))
    for step in range(3):
        model(torch.ones(2, 40)).square().mean().backward()
    print("attached " + str(bool(model._get_ddp_logging_data().get("comm_hook"))) + "\\n", end="", flush=True)
    dist.barrier()
if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, nprocs=2, start_method="METHOD")
"""
ENDLESS = """
import time
print(f"pid {os.getpid()}", flush=True)
time.sleep(1000)
"""


def start(folder, source, options=(), arguments=(), command="run", **more):
    (folder / "train.py").write_text(BEGIN + source)
    words = [sys.executable, "-m", "gradwire", command, *options, "--", "train.py", *arguments]
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        words,
        cwd=folder,
        env={**environment, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def run(*args, **more):
    with start(*args, **more) as process:
        try:
            printed, said = process.communicate(timeout=300)
        finally:
            process.kill()
    return process.returncode, printed, said


@pytest.mark.full
def test_a_script_sets_up_logging_as_it_would_alone(tmp_path):
    code, _, said = run(tmp_path, LOGGING, arguments=["own.log"])
    assert code == 0, said
    assert (tmp_path / "own.log").read_text().splitlines() == ["own a line", "own a warning"]
    assert "a warning" not in said


def test_warnings_are_shown_until_the_script_sets_up_logging(tmp_path):
    code, _, said = run(tmp_path, "import logging; logging.getLogger('gradwire').warning('careful')")
    assert code == 0
    assert said.count("gradwire: careful") == 1


@pytest.mark.full
def test_a_script_that_shards_its_model_gets_the_recipe(tmp_path):
    code, _, said = run(tmp_path, SHARDED, ["--ranks", "2", "--recipe", "int8", "--state", "states"], ["3"])
    assert code == 0, said
    assert "gradwire int8: 3 steps" in said
    assert len(list((tmp_path / "states").glob("model0-step3-*-rank[01]of2.pt"))) == 2
    assert "(75% saved), no errors" in said or "(74% saved), no errors" in said


@pytest.mark.full
def test_a_script_that_shards_its_model_is_measured(tmp_path):
    options = ["--ranks", "2", "--recipe", "int8", "--steps", "8"]
    code, printed, said = run(tmp_path, SHARDED, options, ["1000"], command="headroom")
    assert code == 0, said
    assert "int8" in printed


@pytest.mark.full
def test_options_of_attach_can_be_given(tmp_path):
    options = ["--ranks", "2", "--on-nonfinite", "skip", "--verify-every", "1", "--telemetry", "events.jsonl"]
    code, printed, said = run(tmp_path, TRAIN, options, ["nan"])
    assert code == 0, said
    assert printed.count("finite") == printed.count("True") == 2  # two ranks share a stream
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on-nonfinite", "stop"], "--on-nonfinite is one of propagate, skip, raise, not 'stop'"),
        (["--telemetry", "no/such/folder.jsonl"], "--telemetry: cannot write no/such/folder.jsonl"),
    ],
)
def test_wrong_options_of_attach_are_explained(tmp_path, options, message):
    code, _, said = run(tmp_path, TRAIN, options)
    assert code == 2
    assert message in said


@pytest.mark.full
def test_training_the_module_inside_a_model_is_told(tmp_path):
    code, _, said = run(tmp_path, TRAIN, arguments=["module"])
    assert code == 0, said
    assert "1 DistributedDataParallel averaged 0 steps, though optimizers took 3" in said
    assert "and not its .module" in said


@pytest.mark.full
def test_a_script_that_spawns_its_ranks_is_told_what_to_do(tmp_path):
    code, printed, said = run(tmp_path, SPAWNING)
    assert code == 0, said
    assert printed.count("worker") == 2
    assert "no model trained with it (none made)" in said
    assert "the script starts processes itself (torch.multiprocessing.spawn)" in said


def test_a_measured_script_that_spawns_its_ranks_is_told_what_to_do_at_once(tmp_path):
    code, printed, said = run(tmp_path, SPAWNING, ["--ranks", "1"], command="headroom")
    assert code == 1
    assert "worker" not in printed
    assert said.count("the script starts processes itself (torch.multiprocessing.spawn)") == 1


@pytest.mark.full  # make test-frameworks has the real ones
def test_ranks_that_a_framework_starts_are_attached_to(tmp_path):
    (tmp_path / "lightning_fabric.py").write_text(LAUNCHER)
    code, printed, said = run(tmp_path, "import lightning_fabric; lightning_fabric.start(2)" + TRAINED)
    assert code == 0, said
    assert printed.count("attached True") == 2, said
    assert said.count("gradwire bf16: 3 steps") == said.count("sent by rank 0 instead of") == 1


@pytest.mark.full
def test_a_framework_that_would_wait_for_other_ranks_is_refused_at_once(tmp_path):
    (tmp_path / "lightning_fabric.py").write_text(LAUNCHER)
    source = "import lightning_fabric; lightning_fabric.start(3)"
    code, _, said = run(tmp_path, source, ["--ranks", "2"])
    assert code == 1
    assert "lightning_fabric wants 3 ranks, and this run has 2" in said
    assert "Pass --ranks 3" in said


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.full)])
def test_ranks_that_a_script_spawns_are_attached_to(tmp_path, method):
    code, printed, said = run(tmp_path, SPAWNED.replace("METHOD", method))
    assert code == 0, said
    assert printed.count("attached True") == 2, said
    assert said.count("gradwire bf16: 3 steps") == said.count("sent by rank 0 instead of") == 1


@pytest.mark.full
def test_ctrl_c_ends_all_ranks_without_a_traceback_of_torchrun(tmp_path):
    with start(tmp_path, ENDLESS, ["--ranks", "2"], start_new_session=True) as process:
        try:
            pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "gradwire run: interrupted; every rank is ended" in said
    assert "SignalException" not in said
    assert "Traceback" not in said
    wait_until_gone(pids)
