"""Reach the processes that a script starts itself: those of Lightning, Ray, ``mp.spawn`` and others.

`gradwire run` leaves its recipe in the environment, and a ``sitecustomize`` on PYTHONPATH. So every Python
process that descends from the script attaches to the models that it makes. A forked process has the patches
of its parent already. Each process leaves a note, from which the parent sums up.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradwire.ddp import Attachments
from gradwire.scripts.observing import Observations
from gradwire.scripts.states import ScriptStates
from gradwire.scripts.summary import describe_models
from gradwire.sharded import attach_to_all
from gradwire.telemetry import Telemetry

_VARIABLE = "GRADWIRE_RUN"
_SITE = Path(__file__).parent / "child_site"
_kept: list[Any] = []
"""Contexts that last as long as this process."""


@dataclass(frozen=True)
class RunTask:
    """A recipe and options, as text that other processes read."""

    recipe: str
    on_nonfinite: str = "propagate"
    verify_every: int = 0
    telemetry: str | None = None
    state: str | None = None
    """The folder for what the recipe remembers; None to keep nothing."""
    state_every: int = 100

    def make_states(self) -> ScriptStates:
        """Return what keeps the states of the wires of one process."""
        return ScriptStates(None if self.state is None else Path(self.state), self.state_every)

    @property
    def options(self) -> dict[str, Any]:
        """The options of `attach`."""
        telemetry = None if self.telemetry is None else Telemetry(jsonl=self.telemetry)
        return {
            "on_nonfinite": self.on_nonfinite,
            "verify_every": self.verify_every,
            "telemetry": telemetry,
        }


class Children:
    """The processes below this one that have made models."""

    def __init__(self, folder: Path) -> None:
        """Read the notes that they leave in ``folder``."""
        self.folder = folder

    @property
    def num_attached(self) -> int:
        """The number of processes that gradwire has attached in."""
        return len(list(self.folder.iterdir()))

    def summaries(self) -> list[str]:
        """Return the lines of the processes that were rank 0."""
        return [text for path in sorted(self.folder.iterdir()) if (text := path.read_text())]


@contextlib.contextmanager
def reach_children(task: RunTask) -> Iterator[Children]:
    """Let every Python process that starts inside this context attach by ``task``."""
    folder = Path(tempfile.mkdtemp(prefix="gradwire-run-"))
    before = {name: os.environ.get(name) for name in (_VARIABLE, "PYTHONPATH")}
    os.environ[_VARIABLE] = json.dumps({**vars(task), "notes": str(folder)})
    # The package's own folder comes last, for a parent that has found gradwire in its working directory.
    paths = [str(_SITE), before["PYTHONPATH"], str(Path(__file__).parents[2])]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    owner = os.getpid()
    try:
        yield Children(folder)
    finally:
        if os.getpid() == owner:
            for name, value in before.items():
                os.environ.pop(name, None)  # the script may have removed it
                if value is not None:
                    os.environ[name] = value
            shutil.rmtree(folder, ignore_errors=True)


def serve_as_child() -> None:
    """Attach to every model of this process from now on, as a process above it was asked to."""
    settings = json.loads(os.environ[_VARIABLE])
    folder = Path(settings.pop("notes"))
    task = RunTask(**settings)
    states = task.make_states()
    attaching = attach_to_all(task.recipe, states.add, **task.options)
    _kept.append(attaching)
    note_at_exit(folder, attaching.__enter__())
    util.Finalize(None, states.end, exitpriority=1)


def note_forks(children: Children, attachments: Attachments) -> None:
    """Let processes that are forked from this one note what they have done; they are patched already.

    That holds for as long as ``attachments`` exists.
    """
    util.register_after_fork(attachments, functools.partial(note_at_exit, children.folder))


def note_at_exit(folder: Path, attachments: Attachments) -> None:
    """Write down what this process has averaged when it ends, or when its process group does."""
    note = _Note(folder / str(os.getpid()), attachments)
    note.write()
    util.Finalize(None, note.write, exitpriority=0)
    # Ray kills its workers: they run no exit functions, but destroy their group first.
    for module in (dist, dist.distributed_c10d):
        destroy = module.destroy_process_group
        module.destroy_process_group = note.before(destroy)  # type: ignore[attr-defined]


class _Note:
    def __init__(self, path: Path, attachments: Attachments) -> None:
        self._path = path
        self._attachments = attachments
        self._pid = os.getpid()

    def write(self) -> None:
        """Write the lines of rank 0, or an empty file; do nothing if the parent is gone."""
        if os.getpid() != self._pid:
            return
        is_first = any(model.rank == 0 for model in self._attachments.made)
        text = "\n".join(describe_models(self._attachments, Observations())) if is_first else ""
        with contextlib.suppress(OSError):
            self._path.write_text(text)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def write_and_call(*args: Any, **kwargs: Any) -> Any:
            self.write()
            return function(*args, **kwargs)

        return write_and_call
