"""``gradwire run``: run a training script as it is, with a recipe."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import typer

import gradwire
from gradwire.cli.ending import FAILED, INTERRUPTED, WRONG_ARGUMENTS, stop
from gradwire.cli.options import takes_options
from gradwire.cli.run_options import RunOptions
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


@takes_options(RunOptions)
def run(options: RunOptions) -> None:
    """Run a training script as it is, with gradwire in every DDP or FSDP2 model it makes.

    Start ranks on this machine with --ranks. Or put it in place of python in
    the command that starts each rank, under torchrun and in `gradwire lab`
    alike. Ranks that the script starts itself (Lightning, Ray,
    torch.multiprocessing) get the recipe too. Rank 0 sums up at the end. A hook
    that the script registers itself wins, with a warning.

    Examples: two ranks here; the same with torchrun; two hosts on a slow network:

        gradwire run --ranks 2 --recipe int4 -- train.py --lr 0.1

        torchrun --nproc-per-node 2 -m gradwire.run --recipe int4 train.py

        gradwire lab --rate 100mbit -- gradwire run --recipe int4 -- train.py

    Exit codes: the script's own; 1 if it raises; 2 wrong arguments; 130
    interrupted. With --ranks: 1 if a rank fails, and the output says which and
    how.
    """
    try:
        gradwire.recipe(options.recipe)
        script = options.script()
        options.check()
    except ValueError as error:
        stop("run", str(error), WRONG_ARGUMENTS)
    try:
        if options.num_ranks is not None:
            _run_torchrun(options.num_ranks, options.rank_words(script))
        else:
            _run_as_rank(script, options.task(), options.quiet)
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
