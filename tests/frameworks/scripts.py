"""The scripts of `examples/` in processes of their own, as users start them."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def example(name):
    return str(ROOT / "examples" / f"{name}_train.py")


def start(command, folder):
    """Start ``python COMMAND`` in a process group of its own."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONFAULTHANDLER": "1"}  # so that a rank that aborts says where
    environment |= {"HF_HUB_OFFLINE": "1", "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(command, folder):
    """Run to the end; return the exit code and everything that was said."""
    with start(command, folder) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        finally:
            kill(process)
    return process.returncode, said


def run_well(command, folder):
    code, said = run(command, folder)
    assert code == 0, said[-6000:]
    return said


def run_until(command, folder, line):
    """Run until a line is printed, then kill every process."""
    with start(command, folder) as process:
        limit = threading.Timer(LIMIT_S, kill, [process])
        limit.start()
        try:
            said = []
            for each in process.stdout:
                said.append(each)
                if each.strip() == line:
                    break
            else:
                raise AssertionError("".join(said)[-6000:])
        finally:
            limit.cancel()
            kill(process)


# A script that runs another, which stands still once it has printed that it has taken a step.
PAUSING = """
import builtins, functools, runpy, sys, threading

show = builtins.print

@functools.wraps(show)  # numba looks for it by its name
def show_and_pause(*words, **options):
    show(*words, **options)
    if words == ("step", {step}):
        threading.Event().wait()

builtins.print = show_and_pause
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kill(process):
    """Kill a process group, and the ranks that torchrun has put into sessions of their own."""
    children = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.split()
    parents = dict(zip(map(int, children[::2]), map(int, children[1::2]), strict=True))
    found = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def weights(folder):
    saved = torch.load(folder / "weights.pt")
    return torch.cat([tensor.flatten().float() for tensor in saved.values()])
