"""`gradwire headroom -- SCRIPT` with scripts that print, abort at exit, or have odd names."""

import os
import subprocess
import sys

import pytest

from gradwire.headroom import read_records

SCRIPT = """
import atexit, os, signal, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
print("a line of the script's", flush=True)
os.write(1, b"and one past python\\n")
if "abort" in sys.argv:
    atexit.register(os.kill, os.getpid(), signal.SIGABRT)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(300, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    model(torch.randn(3, 300)).square().mean().backward()
    optimizer.step()
"""
PRINTING_MODEL = """
import torch
print("imported")
def make():
    print("made")
    return torch.nn.Linear(8, 8), torch.randn(2, 8), torch.Tensor.sum
"""


def gradwire(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path]).strip(os.pathsep)},
    )


def measure(folder, *arguments, name=b"train.py"):
    """Measure the script, which takes exactly as many steps as are needed to time one."""
    script = folder / os.fsdecode(name)
    script.write_text(SCRIPT)
    options = ["--ranks", "1", "--recipe", "noop", "--steps", "1"]
    return gradwire(folder, "headroom", *options, *arguments[:2], "--", script, *arguments[2:])


@pytest.mark.full
def test_json_on_stdout_stands_alone_whatever_the_script_prints(tmp_path):
    done = measure(tmp_path, "--json", "-")
    assert done.returncode == 0, done.stderr
    (found,) = read_records(done.stdout.decode())
    assert [row.recipe for row in found.rows] == ["allreduce", "noop"]
    assert done.stderr.count(b"a line of the script's") == 2
    assert done.stderr.count(b"and one past python") == 2


@pytest.mark.full
def test_json_on_stdout_stands_alone_whatever_a_model_prints(tmp_path):
    (tmp_path / "mine.py").write_text(PRINTING_MODEL)
    options = ["--model", "mine:make", "--ranks", "1", "--recipe", "noop", "--steps", "1", "--json", "-"]
    done = gradwire(tmp_path, "headroom", *options)
    assert done.returncode == 0, done.stderr
    read_records(done.stdout.decode())
    assert b"made" in done.stderr


@pytest.mark.full
def test_a_script_whose_name_is_not_utf8_is_measured_like_any_other(tmp_path):
    done = measure(tmp_path, "--html", "page.html", name=b"train\xff.py")
    assert done.returncode == 0, done.stderr
    assert b"train\\udcff.py" in done.stdout.replace(b"\n", b"")  # a long path is wrapped
    assert "train\\udcff.py" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_it_says_what_auto_would_send_for_the_scripts_gradients(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--ranks", "2", "--recipe", "noop", "--steps", "1", "--budget", "0.1", "--json", "found.json"]
    done = gradwire(tmp_path, "headroom", *options, "--", script)
    assert done.returncode == 0, done.stderr
    (found,) = read_records((tmp_path / "found.json").read_text())
    proposed = found.proposal
    assert sum(count for _, count in proposed.counts) == 2
    assert 0 < proposed.error < 0.1
    assert 0 < proposed.bytes_per_step < found.allreduce.bytes_per_step / 3
    assert f"auto:budget=0.1 would send {proposed.bytes_per_step:,}".encode() in done.stdout


SHARDED_SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


# The same, with a DDP model beside it.
TWO_KINDS_SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
sharded = fully_shard(torch.nn.Linear(8, 8))
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sharded, model)]
for step in range(50):
    for each, optimizer in zip((sharded, model), optimizers):
        optimizer.zero_grad()
        each(torch.ones(2, 8)).sum().backward()
        optimizer.step()
"""


@pytest.mark.full
def test_it_says_why_nothing_is_proposed_for_a_sharded_model(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SHARDED_SCRIPT)
    options = ["--ranks", "2", "--recipe", "powersgd", "--steps", "1", "--budget", "0.1"]
    done = gradwire(tmp_path, "headroom", *options, "--json", "found.json", "--", script)
    assert done.returncode == 0, done.stderr
    (found,) = read_records((tmp_path / "found.json").read_text())
    assert [row.recipe for row in found.rows] == ["allreduce", "noop"], "low rank is left out"
    assert b"powersgd is not attached" in done.stderr
    assert (found.proposal, found.sharding) == (None, "fsdp")
    assert found.no_proposal.startswith(
        "What auto:budget=0.1 would send is not known: fully_shard has sharded"
    )
    assert found.no_proposal.encode() in b" ".join(done.stdout.split())


@pytest.mark.full
def test_it_says_that_a_proposal_leaves_out_a_sharded_model_beside_a_ddp_model(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_KINDS_SCRIPT)
    options = ["--ranks", "2", "--recipe", "noop", "--steps", "1", "--budget", "0.1", "--json", "found.json"]
    done = gradwire(tmp_path, "headroom", *options, "--", script)
    assert done.returncode == 0, done.stderr
    (found,) = read_records((tmp_path / "found.json").read_text())
    assert sum(count for _, count in found.proposal.counts) == 2, "the weight and the bias of the DDP model"
    said = b" ".join(done.stdout.split())
    assert b"That leaves out a model that fully_shard has sharded: --budget reads" in said
    assert b"of plain DDP's" not in said, "those are the bytes of both models"


@pytest.mark.full
def test_a_rank_that_aborts_once_it_has_left_its_result_is_measured(tmp_path):
    done = measure(tmp_path, "--json", "record.json", "abort")
    assert done.returncode == 0, done.stderr
    (found,) = read_records((tmp_path / "record.json").read_text())
    assert [row.recipe for row in found.rows] == ["allreduce", "noop"]
