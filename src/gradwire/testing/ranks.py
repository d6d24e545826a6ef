"""Real Gloo ranks on this machine, or on the hosts of a lab: started fast, ended for certain."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import math
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.hook_runner import hook_name
from gradwire.lab import Lab
from gradwire.lab.namespaces import enter

T = TypeVar("T")

# Once one rank has failed, the others get this long to fail as well and tell why.
_GRACE_S = 10.0
# bf16 layers die with SIGILL on some virtual CPUs that advertise AMX; a user's own setting wins.
_ENVIRONMENT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
# DistributedDataParallel imports torch._dynamo when it is made, which alone takes a second or two.
_PRELOAD = ["torch._dynamo", "torch.distributed", "torch.nn.parallel", "gradwire.testing"]
# numba and its kernels, which are compiled here once and not by each rank.
_PRELOAD += [f"gradwire.ops.cpu.{family}" for family in ("casts", "blocks", "low_rank")]


class RanksFailed(RuntimeError):
    """One or more ranks raised, crashed or did not finish; the text has every rank's traceback."""

    def __init__(self, text: str, errors: dict[int, str]) -> None:
        super().__init__(text)
        self.errors = errors
        """What went wrong, by rank."""


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    timeout: float = 60.0,
    *,
    args: Sequence[Any] = (),
    on_message: Callable[[int, Any], None] | None = None,
    lab: Lab | None = None,
) -> list[T]:
    """Run ``fn(rank, *args)`` on real ranks with an initialised Gloo process group.

    Args:
        fn: a function that can be imported, that is, defined at the top level of a module, or a partial
            or an object that pickles. What it returns must pickle.
        world_size: how many ranks, each a process with one torch thread.
        timeout: seconds after which every rank is ended, whatever it does.
        args: further arguments.
        on_message: called in this process with ``(rank, message)`` for each `send_message` of a rank.
        lab: where the ranks run, one on each host; by default on this machine and its loopback.

    Returns every rank's result, in rank order. Raises `RanksFailed` when a rank raises, crashes (also
    while it exits) or is still running at the timeout; then the text has the stack of each. No process
    is left behind, also if this one is killed: neither a rank nor what it has started, unless that has
    left the rank's process group. ValueError for what cannot be handed to a rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if lab is not None and world_size != lab.num_hosts:
        raise ValueError(f"a lab of {lab.num_hosts} hosts has as many ranks, not {world_size}")
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
    context = mp.get_context("forkserver" if sys.platform != "win32" else "spawn")
    if sys.platform != "win32":
        # The server imports torch once; a rank is then forked in milliseconds instead of seconds.
        context.set_forkserver_preload([*_PRELOAD, *{"pytest", "hypothesis"}.intersection(sys.modules)])
        with _ignoring_interrupts():
            multiprocessing.forkserver.ensure_running()
    with contextlib.nullcontext() if lab is None else _on_first_host(lab):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = "127.0.0.1" if lab is None else lab.address(0)
    with tempfile.TemporaryDirectory(prefix="gradwire-ranks-") as folder:
        ranks = []
        try:
            for rank in range(world_size):
                job = _Job(fn, tuple(args), rank, world_size, timeout, address, store.port, folder)
                if lab is not None:
                    job = replace(job, namespace=lab.path(rank), environment=lab.environment(rank))
                ranks.append(_Rank.start(context, job))
            _collect(ranks, time.monotonic() + timeout, on_message)
        finally:
            for process in ranks:
                process.end()
                process.connection.close()
        errors = {r.job.rank: r.error for r in ranks if r.error is not None}
        if errors:
            lines = [f"rank {r.job.rank}: {r.error or 'finished'}".rstrip() for r in ranks]
            header = f"{len(errors)} of {world_size} ranks of {hook_name(fn)} failed"
            raise RanksFailed("\n\n".join([header, *lines]), errors)
        return [r.result for r in ranks]


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """What is started meanwhile ignores a Ctrl-C: that is for this process, which ends its ranks itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _on_first_host(lab: Lab) -> Iterator[None]:
    """Inside the lab, without torch's warning, written by C++, that hosts there have no names."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with lab.inside(0), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(before, 2)
        os.close(before)


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
class _Job:
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


@dataclass
class _Rank:
    """One rank as its parent sees it."""

    job: _Job
    process: mp.process.BaseProcess
    connection: Connection
    result: Any = None
    error: str | None = None
    reported: bool = False
    ended: bool = False
    silent: bool = False
    """Whether the rank has closed its end of the pipe: there is nothing more to read."""

    @classmethod
    def start(cls, context: Any, job: _Job) -> _Rank:
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank_main, args=(theirs, job), daemon=True)
        try:
            process.start()
        except BaseException as error:
            ours.close()  # so that a rank that the server starts late sees that nobody waits
            if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
                raise ValueError(
                    "what ranks run must be from the top level of a module, and its arguments must pickle: "
                    f"{error}"
                ) from error
            raise
        finally:
            theirs.close()
        return cls(job, process, ours)

    @property
    def done(self) -> bool:
        return self.process.exitcode is not None and self.silent

    def read(self, on_message: Callable[[int, Any], None] | None) -> None:
        """Take what the rank has sent, and note how it ended."""
        code = self.process.exitcode
        if code is not None:
            self.end()
        try:
            while not self.silent and self.connection.poll():
                kind, value = _unpickled(self.connection.recv_bytes())
                if kind == "message":
                    if on_message is not None:
                        on_message(self.job.rank, value)
                elif kind == "result":
                    self.reported, self.result = True, value
                else:
                    self.reported, self.error = True, self.error or value
        except (EOFError, ConnectionResetError):
            self.silent = True
        if code is not None and self.error is None and (code != 0 or not self.reported):
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            when = "while exiting, its function had returned" if self.reported else "while running"
            self.error = f"ended with {how}, {when}\n{self._stack()}"

    def dump_stack(self) -> None:
        if self.process.exitcode is None and self.process.pid and hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)

    def give_up(self, why: str) -> None:
        if self.process.exitcode is None and self.error is None:
            self.error = f"{why}\n{self._stack()}"

    def _stack(self) -> str:
        return self.job.stack_file.read_text() if self.job.stack_file.exists() else ""

    def end(self) -> None:
        """End the rank, if it still runs, and what it has started, which may hold the pipe open."""
        if self.ended:
            return
        self.ended = True  # once: the system may later give its number to another
        if hasattr(os, "killpg"):
            assert self.process.pid is not None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.exitcode is None:  # it may not have come to lead its group yet
            self.process.kill()
        self.process.join()


def _unpickled(data: bytes) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(data)
    except Exception:
        return "error", f"what it sent does not unpickle here\n{traceback.format_exc()}"
    return kind, value


def _collect(ranks: list[_Rank], deadline: float, on_message: Callable[[int, Any], None] | None) -> None:
    why = "still running at the timeout, ended"
    while True:
        running = [r for r in ranks if not r.done]
        for r in ranks:
            r.read(on_message)
        if not running:
            return
        if any(r.error for r in ranks) and time.monotonic() + _GRACE_S < deadline:
            deadline = time.monotonic() + _GRACE_S
            why = f"still running {_GRACE_S:g} s after another rank had failed, ended"
        left = deadline - time.monotonic()
        if left <= 0:
            for r in running:
                r.dump_stack()
            time.sleep(0.3)  # for the signal handlers to write their files
            for r in running:
                r.read(on_message)
                r.give_up(why)
            return
        waitable: list[Any] = [r.process.sentinel for r in running]
        waitable += [r.connection for r in running if not r.silent]
        multiprocessing.connection.wait(waitable, timeout=min(left, 1.0))


# --- inside a rank ---

_to_parent: Connection | None = None
_stack_file: TextIO | None = None
_sending = threading.Lock()


def _rank_main(connection: Connection, job: _Job) -> None:
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
    threading.Thread(target=_die_with_parent, args=(connection,), daemon=True).start()
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


def _die_with_parent(connection: Connection) -> None:
    """The parent never writes; the pipe ends when the parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    if hasattr(os, "killpg"):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
