"""GPUs that several ranks of this machine share, through CUDA's Multi-Process Service (MPS).

Without it, processes take turns of about two milliseconds on a GPU. A rank that waits for another then waits
for that one's turn: an all-reduce over NCCL takes a whole number of turns, and no two messages take as long.
With it, their kernels run side by side, as on GPUs of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from gradwire.processes import kill_group

_CONTROL = "nvidia-cuda-mps-control"
# Ends the service when nobody holds the other end of its input any more, also if that process was killed.
_SERVE = f"({_CONTROL} -f < /dev/null; kill $$) & read -r line; echo quit | {_CONTROL}; wait"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ANSWER_LIMIT_S, _START_LIMIT_S, _END_LIMIT_S = 10.0, 30.0, 10.0
# A process whose environment names the service but cannot reach its server has no GPU at all.
_USE_A_GPU = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
sys.exit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""


@contextlib.contextmanager
def sharing_gpus(num_ranks: int) -> Iterator[dict[str, str]]:
    """Let ranks that share a GPU run at the same time; yield the environment that they need for it.

    The service is started if ranks outnumber the GPUs, and ends with the block. Where it cannot be had, ranks
    take turns. If one runs already, or ``CUDA_MPS_PIPE_DIRECTORY`` is set, none is started.
    """
    num_gpus = torch.cuda.device_count()
    if num_ranks <= num_gpus or shutil.which(_CONTROL) is None or _PIPES in os.environ or runs_at_once():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="gradwire-mps-") as folder:
        environment = {_PIPES: folder, _LOGS: folder}
        service = subprocess.Popen(
            ["sh", "-c", _SERVE],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C ends the ranks first
        )
        if _VISIBLE in os.environ:  # the service numbers the GPUs that are visible to it from 0
            environment[_VISIBLE] = ",".join(map(str, range(num_gpus)))
        try:
            yield environment if _serves(service, environment) else {}
        finally:
            _end(service)


def runs_at_once(environment: dict[str, str] | None = None) -> bool:
    """Return True if processes with this environment share GPUs at the same time; by default with our own."""
    if shutil.which(_CONTROL) is None:
        return False
    return _ends_well([_CONTROL], environment or {}, _ANSWER_LIMIT_S, text="get_server_list\n")


def _serves(service: subprocess.Popen[bytes], environment: dict[str, str]) -> bool:
    """Wait for the service to start; return True if a process can use a GPU through it."""
    deadline = time.monotonic() + _START_LIMIT_S
    while service.poll() is None and time.monotonic() < deadline:
        if runs_at_once(environment):
            return _ends_well([sys.executable, "-c", _USE_A_GPU], environment, _START_LIMIT_S)
        time.sleep(0.05)
    return False


def _end(service: subprocess.Popen[bytes]) -> None:
    """End the service. It waits for its clients, which have ended by now."""
    assert service.stdin is not None
    service.stdin.close()
    try:
        service.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        kill_group(service.pid)
        service.wait()


def _ends_well(command: list[str], environment: dict[str, str], limit_s: float, text: str = "") -> bool:
    """Run a command that reads ``text``; return True if it ends in time, and with 0."""
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
