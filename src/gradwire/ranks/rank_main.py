"""The inside of a rank: it joins its process group, runs its function and reports to its parent."""

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

from gradwire.lab import enter_namespace
from gradwire.processes import end_with_parent
from gradwire.torch_private import TCPStore

# bf16 layers die with SIGILL on some virtual CPUs that advertise AMX. A setting of the user's wins.
_ENVIRONMENT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

_to_parent: Connection | None = None
_stack_file: TextIO | None = None
_sending = threading.Lock()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End this rank, and report its stack, if the block takes longer; call it from inside a rank."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_stack_file or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def send_message(message: Any) -> None:
    """Hand ``message`` to the ``on_message`` of `run_ranks`; call it from inside a rank.

    Raises RuntimeError in any other process.
    """
    if _to_parent is None:
        raise RuntimeError("send_message is for ranks that run_ranks has started")
    with _sending:
        _to_parent.send_bytes(pickle.dumps(("message", message)))


@dataclass(frozen=True)
class RankJob:
    """The function that one rank runs, and the place where it runs it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    timeout: float
    """Seconds that a collective of the default group may take."""
    address: str
    """Address of the store."""
    port: int
    """Port of the store."""
    folder: str
    """Temporary folder that all ranks share."""
    namespace: str | None = None
    """Path of the network namespace to run in; None for that of the parent."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables to set."""

    @property
    def stack_file(self) -> Path:
        """The file to which the rank writes its stack."""
        return Path(self.folder) / f"stack{self.rank}"


def rank_main(connection: Connection, job: RankJob) -> None:
    """Run the job, and send what its function returns or raises to the parent."""
    _become_rank(connection, job)
    store = TCPStore(job.address, job.port, is_master=False)
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout),
        )
        _wait_until_connected(store, job.world_size)
        outcome = pickle.dumps(("result", job.fn(job.rank, *job.args)))
    except BaseException:
        outcome = pickle.dumps(("error", traceback.format_exc()))
    with _sending:
        connection.send_bytes(outcome)
    if dist.is_initialized():
        dist.destroy_process_group()
    # multiprocessing ends its children without exit functions; a program runs them.
    atexit._run_exitfuncs()


def _become_rank(connection: Connection, job: RankJob) -> None:
    """Turn this process, just forked from the server, into one that can be watched and ended."""
    global _to_parent, _stack_file
    if connection.poll():  # the parent never writes, so its end is closed: nobody waits for this rank
        os._exit(1)
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # so that the processes that this rank starts end with it
    # A rank may start processes as any program does. A daemon could not, and the server would be slow.
    mp.current_process().daemon = False
    mp.set_start_method(None, force=True)
    gc.freeze()  # the server's imports are no garbage, and visiting them would copy their pages
    if job.namespace is not None:
        enter_namespace(job.namespace)  # before there are threads, which would stay behind
    _to_parent, _stack_file = connection, job.stack_file.open("w")
    end_with_parent(connection.recv_bytes)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(job.rank))
    os.environ.update(job.environment)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=_stack_file, all_threads=True)
    torch.set_num_threads(1)


def _wait_until_connected(store: TCPStore, world_size: int) -> None:
    """Wait until every rank is connected; one that returns early would close connections too soon."""
    if store.add("gradwire/connected", 1) == world_size:
        store.set("gradwire/all-connected", "")
    store.wait(["gradwire/all-connected"], timedelta(days=1))  # `run_ranks` ends the rank before that
