"""Ranks that share a GPU: the service that lets them run at once, whose command is a stand-in here."""

import os
import stat
import subprocess
import sys
import time

import pytest
import torch

from gradwire.ranks import runs_at_once, shared_gpus, sharing_gpus

# Answers while a file is in the folder of its pipes. With -f it makes the file, and runs until that is gone.
CONTROL = f"""#!{sys.executable}
import os, pathlib, sys, time
running = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nowhere"), "running")
if "-f" in sys.argv:
    if "fails" in os.environ.get("STAND_IN", ""):
        sys.exit(1)
    running.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    while running.exists():
        time.sleep(0.01)
    sys.exit(0)
command = sys.stdin.read().strip()
if not running.exists():
    sys.exit(1)
if command == "quit" and "stays" not in os.environ.get("STAND_IN", ""):
    running.unlink()
"""

# Fails if no GPU is visible to this process: the service numbers those that are visible to itself from 0.
SEE_A_GPU = """
import os, pathlib
served = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "running").read_text().split(",")
assert int(os.environ.get("CUDA_VISIBLE_DEVICES", "0")) < len(served)
"""

# Shares the one GPU, tells where the service's pipes are, and waits to be killed.
SHARE = """
import time
import torch
from gradwire.ranks import sharing_gpus, shared_gpus

torch.cuda.device_count = lambda: 1
shared_gpus._USE_A_GPU = ""
with sharing_gpus(2) as environment:
    print(environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(60)
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Put the stand-in on the path of a machine with one GPU, which processes can use."""
    path = tmp_path / "nvidia-cuda-mps-control"
    path.write_text(CONTROL)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(shared_gpus, "_USE_A_GPU", "")
    return monkeypatch


def test_ranks_that_share_a_gpu_run_at_once_while_the_block_lasts(control):
    with sharing_gpus(2) as environment:
        assert runs_at_once(environment)
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder)
    assert not runs_at_once(environment)
    assert not os.path.exists(folder)


def test_the_service_ends_when_the_block_raises(control):
    with pytest.raises(KeyError), sharing_gpus(2) as environment:
        raise KeyError
    assert not runs_at_once(environment)


def test_the_service_ends_when_its_process_is_killed(control, tmp_path):
    script = tmp_path / "share.py"
    script.write_text(SHARE)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        environment = {"CUDA_MPS_PIPE_DIRECTORY": process.stdout.readline().strip()}
        assert runs_at_once(environment)
        process.kill()
    deadline = time.monotonic() + 30
    while runs_at_once(environment) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs_at_once(environment)


def test_a_gpu_of_their_own_needs_no_service_and_asks_for_none(control, tmp_path):
    (tmp_path / "nvidia-cuda-mps-control").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked")
    with sharing_gpus(1) as environment:
        assert environment == {}
    assert not (tmp_path / "asked").exists()


def test_ranks_see_the_gpus_of_the_service_which_numbers_them_from_0(control):
    control.setenv("CUDA_VISIBLE_DEVICES", "5")
    control.setattr(shared_gpus, "_USE_A_GPU", SEE_A_GPU)
    with sharing_gpus(2) as environment:
        assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    control.delenv("CUDA_VISIBLE_DEVICES")
    with sharing_gpus(2) as environment:
        assert environment
        assert "CUDA_VISIBLE_DEVICES" not in environment


def test_ranks_take_turns_without_the_command(control):
    control.setenv("PATH", "/nowhere")
    assert not runs_at_once()
    with sharing_gpus(2) as environment:
        assert environment == {}


@pytest.mark.parametrize("trouble", ["the service ends", "no process reaches it"])
def test_ranks_take_turns_if_the_service_does_not_serve(control, trouble):
    if trouble == "the service ends":
        control.setenv("STAND_IN", "fails")
    else:
        control.setattr(shared_gpus, "_USE_A_GPU", "raise SystemExit(3)")
    with sharing_gpus(2) as environment:
        assert environment == {}


def test_a_service_that_runs_already_is_used(control, tmp_path):
    with sharing_gpus(2) as outer:
        control.setenv("CUDA_MPS_PIPE_DIRECTORY", outer["CUDA_MPS_PIPE_DIRECTORY"])
        with sharing_gpus(2) as environment:
            assert environment == {}
            assert runs_at_once()
        assert runs_at_once()


def test_a_folder_without_a_service_means_turns(control, tmp_path):
    control.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with sharing_gpus(2) as environment:
        assert environment == {}
        assert not runs_at_once()


def test_a_service_that_does_not_quit_is_ended(control):
    control.setattr(shared_gpus, "_END_LIMIT_S", 0.2)
    control.setenv("STAND_IN", "stays")
    with sharing_gpus(2) as environment:
        assert environment
    assert not runs_at_once(environment)
