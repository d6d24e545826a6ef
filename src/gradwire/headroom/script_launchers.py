"""Start the ranks of a script that is measured, and collect their results."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from gradwire.headroom.script_task import ScriptResult, ScriptTask
from gradwire.lab import Lab
from gradwire.processes import (
    describe_exit,
    free_port,
    kill_groups,
    rank_environment,
    under_torchrun,
    wait_for_all,
)
from gradwire.torch_private import TCPStore

_Starter = Callable[..., subprocess.Popen[Any]]
"""``subprocess.Popen``, or a function that knows the place and the environment of a rank."""


class ScriptFailed(RuntimeError):
    """Raised if the script failed, ended too early, or cannot be measured; the text says which."""


class ScriptLauncher(Protocol):
    """Runs a script on all ranks."""

    @property
    def one_machine(self) -> bool:
        """True if all ranks are on this machine."""

    def run(self, task: ScriptTask, index: int) -> list[ScriptResult] | None:
        """Run the script once and return every rank's result; None on ranks that do not report.

        ``index`` tells the runs of one measurement apart. Raises `ScriptFailed`.
        """


def choose_launcher(world_size: int, lab: Lab | None) -> ScriptLauncher:
    """Return the launcher for torchrun's ranks, or for ranks on this machine or in a lab."""
    return _TorchrunLauncher() if under_torchrun() else _LocalLauncher(world_size, lab)


class _LocalLauncher:
    """Starts ranks on this machine, or on the hosts of a lab."""

    one_machine = True

    def __init__(self, world_size: int, lab: Lab | None) -> None:
        self._world_size = world_size
        self._lab = lab

    def run(self, task: ScriptTask, index: int) -> list[ScriptResult] | None:
        with _ScriptProcesses(task) as processes:
            port = free_port()
            for rank in range(self._world_size):
                processes.start(rank, self._starter(rank, port))
            return [ScriptResult.from_json(text) for text in processes.results()]

    def _starter(self, rank: int, port: int) -> _Starter:
        if self._lab is not None:
            return functools.partial(self._lab.start, host=rank)
        size = self._world_size
        environment = rank_environment(
            rank, size, local_rank=rank, local_world_size=size, address="127.0.0.1", port=port
        )
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return functools.partial(subprocess.Popen, env={**os.environ, **environment})


class _TorchrunLauncher:
    """Runs the script in a child of each rank that torchrun started."""

    def __init__(self) -> None:
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(self._size)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Either torchrun's agent keeps a store there, or rank 0 has to.
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = TCPStore(address, port, is_master=not has_agent and self._rank == 0)

    def run(self, task: ScriptTask, index: int) -> list[ScriptResult] | None:
        # The agent's store remembers the ranks of an earlier run, so each run gets a store of its own.
        if self._rank == 0:
            self._store.set(f"gradwire/script/{index}/port", str(free_port()))
        port = self._store.get(f"gradwire/script/{index}/port").decode()
        own_store = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        with _ScriptProcesses(task) as processes:
            processes.start(self._rank, functools.partial(subprocess.Popen, env={**os.environ, **own_store}))
            (result,) = processes.results()
        self._store.set(f"gradwire/script/{index}/{self._rank}", result)
        keys = [f"gradwire/script/{index}/{rank}" for rank in range(self._size)]
        self._store.wait(keys, timedelta(days=1))
        if self._rank != 0:
            return None
        return [ScriptResult.from_json(self._store.get(key).decode()) for key in keys]


class _ScriptProcesses:
    """Processes of a script's ranks.

    They and everything that they start are killed at the end of the block, and if this process ends.
    """

    def __init__(self, task: ScriptTask) -> None:
        self._task = task
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-script-")
        self._lifeline, self._kept_open = os.pipe()
        self._ranks: dict[int, subprocess.Popen[Any]] = {}

    def start(self, rank: int, starter: _Starter) -> None:
        """Start a rank."""
        command = [sys.executable, "-m", "gradwire.headroom.script_rank"]
        command += [self._task.to_json(), str(self._result_file(rank)), str(self._lifeline)]
        # In a session of its own, as torchrun's ranks are. It leads a group, and a Ctrl-C does not reach it.
        self._ranks[rank] = starter(command, pass_fds=[self._lifeline], start_new_session=True)

    def results(self) -> Sequence[str]:
        """Wait for all ranks and return what each has found. Raises ScriptFailed at the first failure."""
        files = [self._result_file(rank) for rank in self._ranks]
        # A rank that has left its result may still be aborted at its exit: Gloo's threads are ended then.
        failure = wait_for_all(list(self._ranks.values()), has_finished=lambda index: files[index].exists())
        if failure is not None:
            rank, how = list(self._ranks)[failure.index], describe_exit(failure.code)
            raise ScriptFailed(f"the script ended with {how} on rank {rank}; its output says why")
        if not all(file.exists() for file in files):
            raise ScriptFailed("the script left its process (os._exit) before it had taken enough steps")
        return [file.read_text() for file in files]

    def _result_file(self, rank: int) -> Path:
        return Path(self._folder.name) / str(rank)

    def __enter__(self) -> _ScriptProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        kill_groups(list(self._ranks.values()))
        os.close(self._lifeline)
        os.close(self._kept_open)
        self._folder.cleanup()
