"""The options of ``gradwire run``, and the script and the task that they describe."""

from __future__ import annotations

import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.options import check_writable
from gradwire.ddp import OnNonfinite
from gradwire.scripts import RunTask, Script

_STATE_EVERY = 100


@dataclass(frozen=True)
class RunOptions:
    """The options as the user gave them."""

    script_words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="A script, with its own arguments."),
    ] = None
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", metavar="RECIPE", help="A recipe, such as int4; `gradwire recipes` lists them."
        ),
    ] = "bf16"
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            metavar="N",
            help="Ranks to start on this machine, with torchrun. Default: this process is one rank.",
            show_default=False,
        ),
    ] = None
    on_nonfinite: Annotated[
        str,
        typer.Option(
            "--on-nonfinite",
            metavar="MODE",
            help="If an averaged gradient is infinite or NaN: propagate it, skip the step, or raise.",
        ),
    ] = "propagate"
    verify_every: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Compare gradients and parameters over ranks every N steps; 0 is never."
        ),
    ] = 0
    telemetry: Annotated[
        Path | None,
        typer.Option(
            "--telemetry",
            metavar="FILE",
            help="Append events and errors to this file, as lines of JSON, every 100 steps.",
            show_default=False,
        ),
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Save what the recipe remembers here, and load it when the script resumes.",
            show_default=False,
        ),
    ] = None
    state_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --state: save every N steps, and at the end.",
            show_default=str(_STATE_EVERY),
        ),
    ] = None
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary at the end.")] = False

    def script(self) -> Script:
        """Return the script to run. Raises ValueError if there is none."""
        return Script.of(self.script_words or [], self.module)

    def check(self) -> None:
        """Make the folder for states; raise ValueError if a run with these options cannot start here."""
        if self.on_nonfinite not in typing.get_args(OnNonfinite):
            modes = ", ".join(typing.get_args(OnNonfinite))
            raise ValueError(f"--on-nonfinite is one of {modes}, not {self.on_nonfinite!r}")
        check_writable("--telemetry", self.telemetry)
        if self.state is not None:
            _make_folder(self.state)
        elif self.state_every is not None:
            raise ValueError("--state-every goes with --state, the folder to save in")
        if self.num_ranks is not None and "RANK" in os.environ:
            raise ValueError("this process is a rank already: leave out --ranks")

    def task(self) -> RunTask:
        """Return what every process of the run does, with absolute paths."""
        file, folder = (
            None if path is None else str(path.resolve()) for path in (self.telemetry, self.state)
        )
        every = _STATE_EVERY if self.state_every is None else self.state_every
        return RunTask(self.recipe, self.on_nonfinite, self.verify_every, file, folder, every)

    def rank_words(self, script: Script) -> list[str]:
        """Return the words after ``gradwire run`` for each rank that ``--ranks`` starts."""
        words = ["--recipe", self.recipe, "--on-nonfinite", self.on_nonfinite]
        words += ["--verify-every", str(self.verify_every)]
        if self.telemetry is not None:
            words += ["--telemetry", str(self.telemetry)]
        if self.state is not None:
            words += ["--state", str(self.state)]
        if self.state_every is not None:
            words += ["--state-every", str(self.state_every)]
        words += [*(["--module"] if script.is_module else []), *(["--quiet"] if self.quiet else [])]
        return [*words, "--", *script.words]


def _make_folder(folder: Path) -> None:
    """Make the folder of ``--state``; ValueError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--state: cannot make the folder {folder}: {error.strerror}") from None
