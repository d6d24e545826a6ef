"""A rank as its parent sees it: a process that reports through a pipe, and ends for certain."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gradwire.processes import describe_exit, kill_group
from gradwire.ranks.rank_main import RankJob, rank_main

OnMessage = Callable[[int, Any], None]

# Once one rank has failed, the others get this long to fail as well and say why.
_GRACE_S = 10.0
# Ranks that are asked for their stacks get this long to begin with them: one that is stopped never does.
_STACK_DUMP_S = 10.0
# A stack file that has not grown for this long is whole.
_STACK_PAUSE_S = 0.2


@dataclass
class RankProcess:
    """One rank: its process, the parent's end of its pipe, and the outcome so far."""

    job: RankJob
    process: mp.process.BaseProcess
    connection: Connection
    result: Any = None
    error: str | None = None
    """The reason of a failure; None so far or for good."""
    reported: bool = False
    """True if the rank has sent a result or an error."""
    ended: bool = False
    """True once `end` was called."""
    silent: bool = False
    """True if the rank has closed its end of the pipe, so that nothing more can come."""

    @classmethod
    def start(cls, context: Any, job: RankJob) -> RankProcess:
        """Start a rank. Raises ValueError if the job does not pickle."""
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(theirs, job), daemon=True)
        try:
            process.start()
        except BaseException as error:
            ours.close()  # tells a rank that the server starts later that nobody waits
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
        """True if the process has ended and everything that it sent was read."""
        return self.process.exitcode is not None and self.silent

    def read(self, on_message: OnMessage | None) -> None:
        """Take everything that the rank has sent, and note an exit that is a failure."""
        code = self.process.exitcode
        if code is not None:
            self.end()
        try:
            while not self.silent and self.connection.poll():
                self._take(*_unpickled(self.connection.recv_bytes()), on_message)
        except (EOFError, ConnectionResetError):
            self.silent = True
        if code is not None and self.error is None and (code != 0 or not self.reported):
            when = "while exiting, its function had returned" if self.reported else "while running"
            self.error = f"ended with {describe_exit(code)}, {when}\n{self._stack()}"

    @property
    def stack_bytes(self) -> int:
        """The size of the stack file so far."""
        return self.job.stack_file.stat().st_size if self.job.stack_file.exists() else 0

    def dump_stack(self) -> None:
        """Ask the rank to write its stack to its file, if it still runs."""
        if self.process.exitcode is None and self.process.pid and hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)

    def give_up(self, reason: str) -> None:
        """Count the rank as failed, if it still runs and has not said why."""
        if self.process.exitcode is None and self.error is None:
            self.error = f"{reason}\n{self._stack()}"

    def end(self) -> None:
        """End the rank, if it still runs, and the processes that it started, which may hold the pipe."""
        if self.ended:
            return
        self.ended = True  # once only: the system may give the process id to another process later
        assert self.process.pid is not None
        kill_group(self.process.pid)
        if self.process.exitcode is None:  # it may not lead its group yet
            self.process.kill()
        self.process.join()

    def _take(self, kind: str, value: Any, on_message: OnMessage | None) -> None:
        if kind == "message":
            if on_message is not None:
                on_message(self.job.rank, value)
        elif kind == "result":
            self.reported, self.result = True, value
        else:
            self.reported, self.error = True, self.error or value

    def _stack(self) -> str:
        return self.job.stack_file.read_text() if self.job.stack_file.exists() else ""


def _unpickled(data: bytes) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(data)
    except Exception:
        return "error", f"what it sent does not unpickle here\n{traceback.format_exc()}"
    return kind, value


def wait_for_ranks(ranks: list[RankProcess], deadline: float, on_message: OnMessage | None) -> None:
    """Read what ranks send until all are done, the deadline has come, or one failed a while ago."""
    reason = "still running at the timeout, ended"
    while True:
        running = [rank for rank in ranks if not rank.done]
        for rank in ranks:
            rank.read(on_message)
        if not running:
            return
        if any(rank.error for rank in ranks) and time.monotonic() + _GRACE_S < deadline:
            deadline = time.monotonic() + _GRACE_S
            reason = f"still running {_GRACE_S:g} s after another rank had failed, ended"
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            _give_up_all(running, reason, on_message)
            return
        waitable: list[Any] = [rank.process.sentinel for rank in running]
        waitable += [rank.connection for rank in running if not rank.silent]
        multiprocessing.connection.wait(waitable, timeout=min(left_s, 1.0))


def _give_up_all(running: list[RankProcess], reason: str, on_message: OnMessage | None) -> None:
    for rank in running:
        rank.dump_stack()
    _wait_for_stacks(running)
    for rank in running:
        rank.read(on_message)
        rank.give_up(reason)


def _wait_for_stacks(ranks: list[RankProcess]) -> None:
    """Wait until all ranks that still run have written their stacks."""
    sizes: list[int] = []
    for _ in range(round(_STACK_DUMP_S / _STACK_PAUSE_S)):
        time.sleep(_STACK_PAUSE_S)
        before, sizes = sizes, [rank.stack_bytes for rank in ranks if rank.process.exitcode is None]
        if all(sizes) and sizes == before:
            return
