"""Inside a rank: its process group, its function, and what it tells the process that has started it."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.lab import enter
from gradwire.processes import end_with_parent

# bf16 layers die with SIGILL on some virtual CPUs that advertise AMX; a user's own setting wins.
_ENVIRONMENT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

_to_parent: Connection | None = None
_stack_file: TextIO | None = None
_sending = threading.Lock()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """From inside a rank: end this rank, with its stack, if the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_stack_file or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def send_message(message: Any) -> None:
    """From inside a rank: hand ``message`` to the ``on_message`` of `run_ranks`."""
    if _to_parent is None:
        raise RuntimeError("send_message is for ranks that run_ranks has started")
    with _sending:
        _to_parent.send_bytes(pickle.dumps(("message", message)))


@dataclass(frozen=True)
class Job:
    """What one rank is to do, and where."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    timeout: float
    address: str
    """Where the store is."""
    port: int
    folder: str
    namespace: str | None = None
    """The network namespace to run in, if not this one."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def stack_file(self) -> Path:
        return Path(self.folder) / f"stack{self.rank}"


def rank_main(connection: Connection, job: Job) -> None:
    """Do the job, and send what its function returns or raises."""
    global _to_parent, _stack_file
    if connection.poll():  # the parent never writes: it was interrupted before this rank was there
        os._exit(1)
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # so that what this rank starts can be ended with it
    # What a rank starts, it starts as any program does: as a daemon it could not, from a server only slowly.
    mp.current_process().daemon = False
    mp.set_start_method(None, force=True)
    gc.freeze()  # what the server has imported is no garbage, and looking at it would copy its pages
    if job.namespace is not None:
        enter(job.namespace)  # before there are threads, which would stay behind
    _to_parent, _stack_file = connection, job.stack_file.open("w")
    end_with_parent(connection.recv_bytes)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(job.rank))
    os.environ.update(job.environment)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=_stack_file, all_threads=True)
    torch.set_num_threads(1)
    store = TCPStore(job.address, job.port, is_master=False)
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout),
        )
        _meet(store, job.world_size)
        outcome = pickle.dumps(("result", job.fn(job.rank, *job.args)))
    except BaseException:
        outcome = pickle.dumps(("error", traceback.format_exc()))
    with _sending:
        connection.send_bytes(outcome)
    if dist.is_initialized():
        dist.destroy_process_group()
    # multiprocessing ends its children without them; a program of its own would run them.
    atexit._run_exitfuncs()


def _meet(store: TCPStore, world_size: int) -> None:
    """Wait until every rank is connected: one that is done at once would end what others still connect to."""
    if store.add("gradwire/connected", 1) == world_size:
        store.set("gradwire/all-connected", "")
    store.wait(["gradwire/all-connected"], timedelta(days=1))  # ended by `run_ranks` before that
