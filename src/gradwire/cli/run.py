"""``gradwire run``: a training script as it is, with a recipe."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

import gradwire
from gradwire.cli.ending import FAILED, WRONG_ARGUMENTS, stop
from gradwire.ddp import attach_to_all
from gradwire.scripts import Script, run_script, show_error, summarize


def run(
    script: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="A file, with its own arguments.")
    ] = None,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="RECIPE", help="Such as int4; `gradwire recipes` lists them.")
    ] = "bf16",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Start so many ranks on this machine, by torchrun. Default: this process is one rank.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary at the end.")] = False,
) -> None:
    """Run a training script as it is, with gradwire in every DistributedDataParallel it makes.

    Goes where python stands in the command that starts each rank, under torchrun
    and in `gradwire lab` alike; --ranks starts them here. Rank 0 sums up at the
    end. A hook that the script registers itself wins, with a warning.

    Examples: two ranks here; the same by torchrun; two hosts on a slow network:

        gradwire run --ranks 2 --recipe int4 -- train.py --lr 0.1

        torchrun --nproc-per-node 2 -m gradwire.run --recipe int4 train.py

        gradwire lab --rate 100mbit -- gradwire run --recipe int4 -- train.py

    Exit codes: the script's own, 1 if it raises; 2 wrong arguments. With --ranks
    torchrun's: 1 if any rank fails, and what it printed says which and how.
    """
    logging.basicConfig(format="%(name)s: %(message)s")
    try:
        chosen, wanted = gradwire.recipe(recipe), Script.of(script or [], module)
        if ranks is not None and "RANK" in os.environ:
            raise ValueError("this process is a rank already: leave --ranks out")
    except ValueError as error:
        stop("run", str(error), WRONG_ARGUMENTS)
    if ranks is not None:
        _start(ranks, wanted, recipe, quiet)
    if "RANK" not in os.environ:
        # As torchrun would set them: a script that needs them is one rank, alone.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with attach_to_all(chosen) as attachments:
        try:
            run_script(wanted)
        except Exception as error:
            show_error(error)
            raise typer.Exit(FAILED) from None
        finally:
            if not quiet and os.environ.get("RANK", "0") == "0":
                typer.echo(summarize(attachments), err=True)


def _start(ranks: int, script: Script, recipe: str, quiet: bool) -> None:
    """Become torchrun, which starts this command on every rank."""
    options = [*(["--module"] if script.is_module else []), *(["--quiet"] if quiet else [])]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = ["-m", "gradwire.run", "--recipe", recipe, *options, "--", *script.words]
    # What torchrun would set, without its warning that it does.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, *command])
