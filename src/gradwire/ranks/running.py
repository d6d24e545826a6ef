"""Real Gloo ranks on this machine, or on the hosts of a lab: started fast, ended for certain."""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from torch._C._distributed_c10d import TCPStore

from gradwire.ddp import hook_name
from gradwire.lab import Lab
from gradwire.processes import end_group, how_it_ended
from gradwire.ranks.inside import Job, rank_main

T = TypeVar("T")

# Once one rank has failed, the others get this long to fail as well and tell why.
_GRACE_S = 10.0
# DistributedDataParallel imports torch._dynamo when it is made, which alone takes a second or two.
_PRELOAD = ["torch._dynamo", "torch.distributed", "torch.nn.parallel", "gradwire.ranks"]
# numba and its kernels, which are compiled here once and not by each rank.
_PRELOAD += [f"gradwire.ops.cpu.{family}" for family in ("casts", "blocks", "low_rank")]
# What a test imports, and its ranks with it.
_PRELOAD_IF_HERE = {"pytest", "hypothesis", "gradwire.testing"}


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
        context.set_forkserver_preload([*_PRELOAD, *_PRELOAD_IF_HERE.intersection(sys.modules)])
        with _ignoring_interrupts():
            multiprocessing.forkserver.ensure_running()
    with contextlib.nullcontext() if lab is None else _on_first_host(lab):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = "127.0.0.1" if lab is None else lab.address(0)
    with tempfile.TemporaryDirectory(prefix="gradwire-ranks-") as folder:
        ranks = []
        try:
            for rank in range(world_size):
                job = Job(fn, tuple(args), rank, world_size, timeout, address, store.port, folder)
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


@dataclass
class _Rank:
    """One rank as its parent sees it."""

    job: Job
    process: mp.process.BaseProcess
    connection: Connection
    result: Any = None
    error: str | None = None
    reported: bool = False
    ended: bool = False
    silent: bool = False
    """Whether the rank has closed its end of the pipe: there is nothing more to read."""

    @classmethod
    def start(cls, context: Any, job: Job) -> _Rank:
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(theirs, job), daemon=True)
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
            when = "while exiting, its function had returned" if self.reported else "while running"
            self.error = f"ended with {how_it_ended(code)}, {when}\n{self._stack()}"

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
        assert self.process.pid is not None
        end_group(self.process.pid)
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
