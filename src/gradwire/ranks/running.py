"""Start Gloo ranks on this machine or on the hosts of a lab, and return what they return."""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

from gradwire.ddp import hook_name
from gradwire.lab import Lab
from gradwire.ops import Family
from gradwire.ranks.rank_main import RankJob
from gradwire.ranks.rank_process import OnMessage, RankProcess, wait_for_ranks
from gradwire.torch_private import TCPStore

T = TypeVar("T")

# DistributedDataParallel imports torch._dynamo when it is made, which alone takes a second or two.
_PRELOAD = ["torch._dynamo", "torch.distributed", "torch.nn.parallel", "gradwire.ranks", "gradwire.training"]
# The server compiles numba's kernels once, so that ranks need not.
_PRELOAD += [f"gradwire.ops.cpu.{family}" for family in get_args(Family)]
# Preloaded if this process has them: ranks of a test import what the test does.
_PRELOAD_IF_HERE = {"pytest", "hypothesis", "gradwire.testing"}
_LOOPBACK = "127.0.0.1"


class RanksFailed(RuntimeError):
    """Raised if a rank raised, crashed or did not finish; the text has every rank's traceback."""

    def __init__(self, text: str, errors: dict[int, str]) -> None:
        super().__init__(text)
        self.errors = errors
        """Error texts by rank."""


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    timeout: float = 60.0,
    *,
    args: Sequence[Any] = (),
    on_message: OnMessage | None = None,
    lab: Lab | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Run ``fn(rank, *args)`` on real ranks with an initialised Gloo process group.

    Args:
        fn: a function from the top level of a module, or a partial or an object that pickles. What it
            returns must pickle.
        world_size: number of ranks, each a process with one torch thread.
        timeout: seconds after which every rank is ended.
        args: further arguments of ``fn``.
        on_message: called in this process with ``(rank, message)`` for each `send_message` of a rank.
        lab: the lab to run in, with as many ranks on each host, one host after the other; by default this
            machine and its loopback.
        environment: variables to set in every rank.

    Returns every rank's result, in rank order. Raises `RanksFailed` if a rank raises, crashes (also while
    it exits) or still runs at the timeout; the text then has the stack of each rank. Raises ValueError
    for arguments that cannot be handed to a rank, and TypeError for a ``world_size`` that is no number.

    No rank is left behind, even if this process is killed. Neither are the processes that a rank started,
    unless they left its process group.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(
            f"world_size is a number of ranks, not {world_size!r}: write run_ranks(fn, world_size)"
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if lab is not None and world_size % lab.num_hosts:
        raise ValueError(
            f"{world_size} ranks cannot be spread evenly over the {lab.num_hosts} hosts of a lab"
        )
    per_host = 1 if lab is None else world_size // lab.num_hosts
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
    context = _fork_context()
    with contextlib.nullcontext() if lab is None else _on_first_host(lab):
        store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    address = _LOOPBACK if lab is None else lab.address(0)
    with tempfile.TemporaryDirectory(prefix="gradwire-ranks-") as folder:
        ranks: list[RankProcess] = []
        try:
            for rank in range(world_size):
                job = RankJob(fn, tuple(args), rank, world_size, timeout, address, store.port, folder)
                variables = dict(environment or {})
                if lab is not None:
                    host, local_rank = divmod(rank, per_host)
                    variables |= lab.environment(host, local_rank, per_host)
                    job = replace(job, namespace=lab.path(host))
                job = replace(job, environment=variables)
                ranks.append(RankProcess.start(context, job))
            wait_for_ranks(ranks, time.monotonic() + timeout, on_message)
        finally:
            for process in ranks:
                process.end()
                process.connection.close()
    _raise_failures(ranks, hook_name(fn))
    return [rank.result for rank in ranks]


def _raise_failures(ranks: list[RankProcess], name: str) -> None:
    errors = {rank.job.rank: rank.error for rank in ranks if rank.error is not None}
    if errors:
        lines = [f"rank {rank.job.rank}: {rank.error or 'finished'}".rstrip() for rank in ranks]
        header = f"{len(errors)} of {len(ranks)} ranks of {name} failed"
        raise RanksFailed("\n\n".join([header, *lines]), errors)


def _fork_context() -> Any:
    """Return the context to start ranks in, with its server running where there is one."""
    if sys.platform == "win32":
        return mp.get_context("spawn")
    # The server imports torch once. It then forks a rank in milliseconds instead of seconds.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *_PRELOAD_IF_HERE.intersection(sys.modules)])
    with _ignoring_interrupts():
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Let processes that start in this block ignore a Ctrl-C: this process ends its ranks itself."""
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
    """Move this thread onto the lab's first host, with stderr silenced.

    torch's C++ code would warn there that the hosts have no names.
    """
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with lab.inside(0), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(before, 2)
        os.close(before)
