"""``gradwire run``: run a training script as it is, with a recipe."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

import gradwire
from gradwire.cli.ending import FAILED, WRONG_ARGUMENTS, stop
from gradwire.ddp import attach_to_all
from gradwire.processes import rank_environment
from gradwire.scripts import Script, run_script, show_error, summarize


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
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary at the end.")] = False,
) -> None:
    """Run a training script as it is, with gradwire in every DistributedDataParallel it makes.

    Put it in place of python in the command that starts each rank, under torchrun
    and in `gradwire lab` alike; or let --ranks start them here. Rank 0 sums up at
    the end. A hook that the script registers itself wins, with a warning.

    Examples: two ranks here; the same with torchrun; two hosts on a slow network:

        gradwire run --ranks 2 --recipe int4 -- train.py --lr 0.1

        torchrun --nproc-per-node 2 -m gradwire.run --recipe int4 train.py

        gradwire lab --rate 100mbit -- gradwire run --recipe int4 -- train.py

    Exit codes: the script's own; 1 if it raises; 2 wrong arguments. With --ranks,
    torchrun's: 1 if a rank fails, and the output says which and how.
    """
    logging.basicConfig(format="%(name)s: %(message)s")
    try:
        chosen, wanted = gradwire.recipe(recipe), Script.of(script or [], module)
        if ranks is not None and "RANK" in os.environ:
            raise ValueError("this process is a rank already: leave out --ranks")
    except ValueError as error:
        stop("run", str(error), WRONG_ARGUMENTS)
    if ranks is not None:
        _become_torchrun(ranks, wanted, recipe, quiet)
    _run_as_rank(wanted, chosen, quiet)


def _run_as_rank(script: Script, recipe: gradwire.Recipe, quiet: bool) -> None:
    """Run the script in this process, as the rank that the environment names, or as the only one."""
    if "RANK" not in os.environ:
        # Scripts may need torchrun's variables.
        os.environ.update(
            rank_environment(0, 1, local_rank=0, local_world_size=1, address="127.0.0.1", port=0)
        )
    with attach_to_all(recipe) as attachments:
        try:
            run_script(script)
        except Exception as error:
            show_error(error)
            raise typer.Exit(FAILED) from None
        finally:
            if not quiet and os.environ.get("RANK", "0") == "0":
                typer.echo(summarize(attachments), err=True)


def _become_torchrun(num_ranks: int, script: Script, recipe: str, quiet: bool) -> NoReturn:
    """Replace this process by torchrun, which starts this command on every rank."""
    options = [*(["--module"] if script.is_module else []), *(["--quiet"] if quiet else [])]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = ["-m", "gradwire.run", "--recipe", recipe, *options, "--", *script.words]
    # torchrun would set it too, and warn about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, *command])
