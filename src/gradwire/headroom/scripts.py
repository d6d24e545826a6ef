"""Step times of a user's own training script, unchanged, with each recipe in turn."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

import gradwire
from gradwire.headroom.contest import rows_of
from gradwire.headroom.measure import conditions, slowest_ms
from gradwire.headroom.records import ALLREDUCE, Record, Row, ring_bytes
from gradwire.headroom.workloads import count_of
from gradwire.lab import Lab
from gradwire.processes import end_group, how_it_ended, wait_for_all
from gradwire.scripts import Script

# DDP rebuilds its buckets after the first; caches and allocators settle.
_NUM_WARM_UP_STEPS = 3
_DEFAULT_NUM_STEPS = 16


class ScriptFailed(RuntimeError):
    """The script failed, ended too early, or cannot be measured; the text says which."""


def measure_script(
    script: Script,
    recipes: Sequence[str | gradwire.Recipe],
    world_size: int,
    *,
    num_steps: int | None = None,
    lab: Lab | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Record | None:
    """Run a script with plain DDP, with each recipe and without communication, and time its steps.

    A step ends with a call of an optimizer, of several with that of the first. Each run ends after
    ``num_steps`` timed ones, on every rank after the same one, and what the script does on the way (logs,
    checkpoints) it does each time.

    Args:
        script: what to run; it makes its models ``DistributedDataParallel`` and its process group from
            the environment, as under torchrun.
        recipes: what to measure beside plain DDP and noop.
        world_size: number of ranks on this machine; under torchrun that of the job.
        num_steps: timed steps of each run; 16 by default.
        lab: where the ranks run, one on each host.
        on_progress: called with ``(runs done, runs in all)``.

    Returns the record; None under torchrun on other ranks than 0. Raises ValueError for recipes that
    there are not, and `ScriptFailed`.
    """
    compared = rows_of(recipes)
    num_steps = num_steps or _DEFAULT_NUM_STEPS
    launcher = _Torchrun() if "TORCHELASTIC_RUN_ID" in os.environ else _Local(world_size, lab)
    found: list[list[dict[str, Any]]] = []
    for index, recipe in enumerate(compared):
        if on_progress is not None:
            on_progress(index, len(compared))
        name = ALLREDUCE if recipe is None else str(recipe)
        task = {
            "recipe": None if recipe is None else name,
            "num_steps": _NUM_WARM_UP_STEPS + num_steps,
            "script": script.name,
            "arguments": script.arguments,
            "is_module": script.is_module,
        }
        ranks = launcher.run(task, index)
        if ranks is not None:
            _check(name, script, ranks, _NUM_WARM_UP_STEPS + num_steps)
            found.append(ranks)
    if on_progress is not None:
        on_progress(len(compared), len(compared))
    if not found:
        return None
    world_size, first = len(found[0]), found[0][0]
    num_parameters, gradient_bytes = (found[-1][0][key] for key in ("num_parameters", "gradient_bytes"))
    rows = []
    for recipe, ranks in zip(compared, found, strict=True):
        times = [rank["times_s"][_NUM_WARM_UP_STEPS:] for rank in ranks]
        sent: int | None = ring_bytes(gradient_bytes, world_size)
        if recipe is not None:
            counts = [rank["bytes_per_step"] for rank in ranks]
            sent = None if None in counts else max(counts)
        figures = [ranks[0].get(key) for key in ("num_messages", "wait_ms", "work_ms")]
        rows.append(
            Row(ALLREDUCE if recipe is None else str(recipe), slowest_ms(times), sent, None, *figures)
        )
    return Record(
        **conditions(lab, launcher.one_machine),
        world_size=world_size,
        threads_per_rank=first["num_threads"],
        backend=first["backend"],
        device=first["device"],
        interleaved=False,
        bucket_mb=None,
        workload=f"{script}, {count_of(num_parameters)} parameters",
        num_parameters=num_parameters,
        gradient_bytes=gradient_bytes,
        rows=tuple(rows),
    )


def _check(name: str, script: Script, ranks: list[dict[str, Any]], num_steps: int) -> None:
    if ranks[0].get("num_models") == 0:
        raise ScriptFailed(
            f"{script} made no DistributedDataParallel that gradwire could attach to (a hook of its own "
            "wins), so there is nothing to compare"
        )
    shortest = min(len(rank["times_s"]) for rank in ranks)
    if shortest < num_steps:
        raise ScriptFailed(
            f"{script} ended after {shortest} optimizer steps with {name}; {num_steps} are needed, "
            f"{_NUM_WARM_UP_STEPS} of them to warm up: give it more to do, or time fewer"
        )


class _Local:
    """Ranks on this machine, or on the hosts of a lab."""

    one_machine = True

    def __init__(self, world_size: int, lab: Lab | None) -> None:
        self._world_size = world_size
        self._lab = lab

    def run(self, task: dict[str, Any], index: int) -> list[dict[str, Any]] | None:
        with _Processes() as processes:
            port = str(_free_port())
            for rank in range(self._world_size):
                processes.start(rank, task, self._starter(rank, port))
            return [json.loads(result) for result in processes.results()]

    def _starter(self, rank: int, port: str) -> Callable[..., subprocess.Popen[Any]]:
        if self._lab is not None:
            return functools.partial(self._lab.start, host=rank)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        return functools.partial(subprocess.Popen, env={**os.environ, **environment})


class _Torchrun:
    """Ranks that torchrun has started, each of which runs the script in a process below it."""

    def __init__(self) -> None:
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(self._size)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The agent keeps one there, or else rank 0 does.
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = TCPStore(address, port, is_master=not has_agent and self._rank == 0)

    def run(self, task: dict[str, Any], index: int) -> list[dict[str, Any]] | None:
        # The agent's store remembers the ranks of an earlier run: each run has a store of its own.
        if self._rank == 0:
            self._store.set(f"gradwire/script/{index}/port", str(_free_port()))
        port = self._store.get(f"gradwire/script/{index}/port").decode()
        own_store = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        with _Processes() as processes:
            popen = functools.partial(subprocess.Popen, env={**os.environ, **own_store})
            processes.start(self._rank, task, popen)
            (result,) = processes.results()
        self._store.set(f"gradwire/script/{index}/{self._rank}", result)
        keys = [f"gradwire/script/{index}/{rank}" for rank in range(self._size)]
        self._store.wait(keys, timedelta(days=1))
        return [json.loads(self._store.get(key)) for key in keys] if self._rank == 0 else None


class _Processes:
    """Ranks of a script; at the end of the block, or of this process in whatever way, they end whole."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-script-")
        self._lifeline, self._kept_open = os.pipe()
        self._ranks: dict[int, subprocess.Popen[Any]] = {}

    def start(self, rank: int, task: dict[str, Any], popen: Callable[..., subprocess.Popen[Any]]) -> None:
        """Start a rank by ``popen``, which knows where and in what environment."""
        task = {**task, "result": str(self._result(rank)), "lifeline": self._lifeline}
        command = [sys.executable, "-m", "gradwire.headroom.script_rank", json.dumps(task)]
        # In a session, so in a group of its own, as torchrun's ranks are; a Ctrl-C is for this process.
        self._ranks[rank] = popen(command, pass_fds=[self._lifeline], start_new_session=True)

    def results(self) -> list[str]:
        """What each rank has found. Raises ScriptFailed as soon as one has not ended well."""
        ranks = list(self._ranks)
        failed = wait_for_all(list(self._ranks.values()))
        if failed is not None:
            index, code = failed
            how = how_it_ended(code)
            raise ScriptFailed(f"the script ended with {how} on rank {ranks[index]}; its output says why")
        paths = list(map(self._result, ranks))
        if not all(path.exists() for path in paths):
            raise ScriptFailed("the script left its process (os._exit) before it had taken enough steps")
        return [path.read_text() for path in paths]

    def _result(self, rank: int) -> Path:
        return Path(self._folder.name) / str(rank)

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._ranks.values():
            end_group(process.pid)
        for process in self._ranks.values():
            process.wait()
        os.close(self._lifeline)
        os.close(self._kept_open)
        self._folder.cleanup()


def _free_port() -> int:
    """Below those that the system hands out: it would give one of them away before the script takes it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
