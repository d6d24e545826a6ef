"""``gradwire run``: a training script as it is, with a recipe."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

import gradwire
from gradwire.cli.ending import WRONG_ARGUMENTS, stop
from gradwire.scripts import Script, attach_to_all, run_script, summarize


def run(
    script: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="A file, with its own arguments.")
    ] = None,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="RECIPE", help="Such as bf16; `gradwire recipes` lists them.")
    ] = "bf16",
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary at the end.")] = False,
) -> None:
    """Run a training script as it is, with gradwire in every DistributedDataParallel it makes.

    Goes where python stands in the command that you start each rank with, so
    under torchrun and in `gradwire lab` alike. Rank 0 sums up at the end. A hook
    that the script registers itself wins, with a warning.

    Examples, of two ranks on this machine and of two hosts on a slow network:

        torchrun --nproc-per-node 2 -m gradwire.run --recipe bf16 train.py --lr 0.1

        gradwire lab --rate 100mbit -- gradwire run --recipe bf16 -- train.py --lr 0.1

    Exit codes: the script's own; 2 wrong arguments.
    """
    logging.basicConfig(format="%(name)s: %(message)s")
    try:
        chosen, wanted = gradwire.recipe(recipe), Script.of(script or [], module)
    except ValueError as error:
        stop("run", str(error), WRONG_ARGUMENTS)
    with attach_to_all(chosen) as attachments:
        try:
            run_script(wanted)
        finally:
            if not quiet and os.environ.get("RANK", "0") == "0":
                typer.echo(summarize(attachments), err=True)
