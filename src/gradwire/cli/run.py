"""``gradwire run``: run a training script as it is, with a recipe."""

from __future__ import annotations

import contextlib
import logging
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import gradwire
from gradwire.cli.ending import FAILED, INTERRUPTED, WRONG_ARGUMENTS, stop
from gradwire.cli.options import check_writable
from gradwire.ddp import OnNonfinite
from gradwire.processes import free_port, rank_environment
from gradwire.scripts import (
    RunTask,
    Script,
    hide_from_launchers,
    note_forks,
    observe,
    reach_children,
    run_script,
    show_error,
    summarize,
)
from gradwire.sharded import attach_to_all


def run(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="A script, with its own arguments."),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", metavar="RECIPE", help="A recipe, such as int4; `gradwire recipes` lists them."
        ),
    ] = "bf16",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Ranks to start on this machine, with torchrun. Default: this process is one rank.",
            show_default=False,
        ),
    ] = None,
    on_nonfinite: Annotated[
        str,
        typer.Option(
            "--on-nonfinite",
            metavar="MODE",
            help="If an averaged gradient is infinite or NaN: propagate it, skip the step, or raise.",
        ),
    ] = "propagate",
    verify_every: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Compare gradients and parameters over ranks every N steps; 0 is never."
        ),
    ] = 0,
    telemetry: Annotated[
        Path | None,
        typer.Option(
            "--telemetry",
            metavar="FILE",
            help="Append events and errors to this file, as lines of JSON, every 100 steps.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Save what the recipe remembers here, and load it when the script resumes.",
            show_default=False,
        ),
    ] = None,
    state_every: Annotated[
        int, typer.Option(min=1, metavar="N", help="Save it every N steps, and at the end.")
    ] = 100,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary at the end.")] = False,
) -> None:
    """Run a training script as it is, with gradwire in every DDP or FSDP2 model it makes.

    Put it in place of python in the command that starts each rank, under torchrun
    and in `gradwire lab` alike; or let --ranks start them here. Ranks that the script
    starts itself (Lightning, Ray, torch.multiprocessing) are reached too. Rank 0 sums
    up at the end. A hook that the script registers itself wins, with a warning.

    Examples: two ranks here; the same with torchrun; two hosts on a slow network:

        gradwire run --ranks 2 --recipe int4 -- train.py --lr 0.1

        torchrun --nproc-per-node 2 -m gradwire.run --recipe int4 train.py

        gradwire lab --rate 100mbit -- gradwire run --recipe int4 -- train.py

    Exit codes: the script's own; 1 if it raises; 2 wrong arguments; 130
    interrupted. With --ranks 1 if a rank fails, and the output says which and how.
    """
    try:
        gradwire.recipe(recipe)
        wanted = Script.of(script or [], module)
        if on_nonfinite not in typing.get_args(OnNonfinite):
            modes = ", ".join(typing.get_args(OnNonfinite))
            raise ValueError(f"--on-nonfinite is one of {modes}, not {on_nonfinite!r}")
        check_writable("--telemetry", telemetry)
        if state is not None:
            _make_folder(state)
        if ranks is not None and "RANK" in os.environ:
            raise ValueError("this process is a rank already: leave out --ranks")
    except ValueError as error:
        stop("run", str(error), WRONG_ARGUMENTS)
    file, folder = (None if path is None else str(path.resolve()) for path in (telemetry, state))
    task = RunTask(recipe, on_nonfinite, verify_every, file, folder, state_every)
    try:
        if ranks is not None:
            words = ["--recipe", recipe, "--on-nonfinite", on_nonfinite, "--verify-every", str(verify_every)]
            words += ["--telemetry", str(telemetry)] if telemetry is not None else []
            words += ["--state", str(state), "--state-every", str(state_every)] if state is not None else []
            words += [*(["--module"] if wanted.is_module else []), *(["--quiet"] if quiet else [])]
            _run_torchrun(ranks, [*words, "--", *wanted.words])
        else:
            _run_as_rank(wanted, task, quiet)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _run_as_rank(script: Script, task: RunTask, quiet: bool) -> None:
    """Run the script in this process, as the rank that the environment names, or as the only one."""
    states, saved_at = task.make_states(), set[int]()
    with contextlib.ExitStack() as stack:
        children = None
        if "RANK" not in os.environ:
            # Scripts may need torchrun's variables, unless they start ranks of their own.
            variables = rank_environment(
                0, 1, local_rank=0, local_world_size=1, address="127.0.0.1", port=free_port()
            )
            os.environ.update(variables)
            stack.enter_context(hide_from_launchers(variables))
            children = stack.enter_context(reach_children(task))
        stack.enter_context(_show_warnings())
        seen = stack.enter_context(observe())
        attachments = stack.enter_context(attach_to_all(task.recipe, states.add, **task.options))
        seen.on_save = lambda: saved_at.update(filter(None, (a.num_steps for a in attachments.made)))
        if children is not None:
            note_forks(children, attachments)
        try:
            run_script(script)
        except Exception as error:
            show_error(error)
            raise typer.Exit(FAILED) from None
        finally:
            states.end()
            if not quiet and os.environ.get("RANK", "0") == "0":
                lines = [] if children is None else children.summaries()
                num_children = 0 if children is None else children.num_attached
                typer.echo(summarize(attachments, seen, lines, num_children, states, saved_at), err=True)


def _make_folder(folder: Path) -> None:
    """Make the folder of ``--state``; ValueError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--state: cannot make the folder {folder}: {error.strerror}") from None


@contextlib.contextmanager
def _show_warnings() -> Iterator[None]:
    """Print gradwire's warnings until the script sets up logging, and leave the root logger to the script."""
    log, handler = logging.getLogger("gradwire"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _run_torchrun(num_ranks: int, command: list[str]) -> None:
    """Start this command on every rank with torchrun, in this process."""
    # Imported here: other commands, and the ranks themselves, do without.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # torchrun would set it too, and warn about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launcher = ["--standalone", "--nproc-per-node", str(num_ranks)]
    try:
        torchrun([*launcher, "-m", "gradwire.run", *command])
    except SignalException as error:
        stop("run", "interrupted; every rank is ended", 128 + error.sigval)
    except ChildFailedError as error:
        stop("run", str(error), FAILED)
