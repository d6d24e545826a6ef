"""Facts about this machine on which training, kernels or the lab depend."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from gradwire.doctor.findings import Finding
from gradwire.lab import LabUnavailable, find_tools
from gradwire.torch_private import missing_names
from gradwire.version import __version__

# Each rank has two connections to each other rank, and DataLoader workers share tensors by file descriptor.
_FEW_FILES = 4096
# NCCL's and DataLoader's buffers in shared memory; Docker gives 64 MiB unless told otherwise.
_LITTLE_SHARED_MEMORY_BYTES = 256 << 20

_INTERFACES = Path("/sys/class/net")
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8  # of linux/if.h


def examine_machine() -> list[Finding]:
    """Return what was found about versions, devices, network interfaces, caches, tools and limits.

    >>> examine_machine()[0].topic
    'versions'
    """
    checks = (_versions, _devices, _interfaces, _kernel_cache, _tools, _limits)
    return [finding for check in checks for finding in check()]


def _versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding("versions", "ok", f"gradwire {__version__}, torch {torch.__version__}, Python {python}")
    if sys.platform != "linux":
        advice = "train on Linux; gradwire is not tested elsewhere"
        yield Finding("versions", "problem", f"this is {platform.system()}", advice)
    for private in missing_names():
        yield Finding(
            "versions",
            "problem",
            f"torch {torch.__version__} lacks {private.path.replace(':', '.')}: {private.purpose}",
            "install another version of torch: docs/versions.md lists those that were tested",
        )


def _devices() -> Iterator[Finding]:
    if torch.version.cuda is None:
        yield Finding("devices", "ok", "this torch is built for CPUs alone: ranks average over Gloo")
    elif not torch.cuda.is_available():
        yield Finding(
            "devices",
            "note",
            f"torch is built for CUDA {torch.version.cuda}, but sees no GPU",
            "if the machine has one, run nvidia-smi: the driver may be missing or older than this CUDA",
        )
    else:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        text = f"{len(names)} GPU(s): {', '.join(sorted(set(names)))}; CUDA {torch.version.cuda}, NCCL {nccl}"
        yield Finding("devices", "ok", text)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("devices", "ok", f"{num_cores} CPU core(s) for this process")


def _interfaces() -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "")
        # NCCL also takes prefixes, and a list of what to leave out.
        exact = [name for name in chosen.split(",") if name] if variable.startswith("GLOO") else []
        missing = [name for name in exact if name not in names]
        if missing:
            yield Finding(
                "network",
                "problem",
                f"{variable} names {', '.join(missing)}, and the interfaces are {', '.join(names)}",
                f"set {variable} to one of them, on this machine",
            )
        elif chosen:
            yield Finding("network", "ok", f"{variable}={chosen}")
    host = socket.gethostname()
    address = own_address()
    if address is None:
        yield Finding(
            "network",
            "note",
            f"the name of this host, {host}, has no address: Gloo falls back to loopback",
            "on several machines, set GLOO_SOCKET_IFNAME to the interface that reaches the others",
        )
    elif address.startswith("127.") and (others := _reaching_out(names)):
        yield Finding(
            "network",
            "note",
            f"the name of this host, {host}, stands for {address}, which other machines cannot reach",
            f"on several machines, set GLOO_SOCKET_IFNAME to {' or '.join(others)}",
        )
    else:
        yield Finding("network", "ok", f"host {host} is {address}; interfaces {', '.join(names)}")


def _reaching_out(names: list[str]) -> list[str]:
    """Return the interfaces that are up, without loopback."""
    return [name for name in names if _flags(name) & (_IFF_UP | _IFF_LOOPBACK) == _IFF_UP]


def _flags(interface: str) -> int:
    """Return the flags that Linux keeps for an interface; those of one that is up if it tells none."""
    try:
        return int((_INTERFACES / interface / "flags").read_text(), base=16)
    except (OSError, ValueError):
        return _IFF_UP


def own_address() -> str | None:
    """Return the address that this host's name stands for, or None if it stands for none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _kernel_cache() -> Iterator[Finding]:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folders = [Path(chosen)] if chosen else [Path(__file__).parents[1] / "ops" / "cpu" / "__pycache__"]
    folders += [] if chosen else [Path.home() / ".cache" / "numba"]
    for folder in folders:
        if _can_write(folder):
            yield Finding("kernels", "ok", f"compiled kernels are kept in {folder}")
            return
    yield Finding(
        "kernels",
        "problem",
        f"no folder for compiled kernels can be written: {', '.join(map(str, folders))}",
        "set NUMBA_CACHE_DIR to a folder that can be written; otherwise every process compiles, for seconds",
    )


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _tools() -> Iterator[Finding]:
    try:
        find_tools()
    except LabUnavailable:
        advice = "install iproute2 (on Debian: apt install iproute2) to use `gradwire lab` and --link"
        yield Finding("tools", "note", "no iproute2: slow networks cannot be simulated", advice)
        return
    if os.geteuid() != 0:
        advice = "run `gradwire lab` and --link as root, for example in a container"
        yield Finding("tools", "note", "not root: slow networks cannot be simulated", advice)
    else:
        yield Finding("tools", "ok", "iproute2 and root: `gradwire lab` can simulate slow networks")


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        yield Finding(
            "limits",
            "note",
            f"a process may open {files} files: enough for about {max(0, files - 64) // 4} ranks",
            f"for more, run `ulimit -n {_FEW_FILES}` before torchrun",
        )
    else:
        yield Finding("limits", "ok", f"a process may open {files if files >= 0 else 'any number of'} files")
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < _LITTLE_SHARED_MEMORY_BYTES:
        yield Finding(
            "limits",
            "problem",
            f"/dev/shm has {free >> 20} MiB free; NCCL and DataLoader workers need more",
            "in Docker, start the container with --shm-size=8g or --ipc=host",
        )
