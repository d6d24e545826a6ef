"""The ``gradwire`` command with all of its subcommands."""

from __future__ import annotations

import inspect
import os
from typing import Annotated

import torch
import typer
from rich.table import Table
from rich.text import Text

import gradwire
from gradwire.cli.consoles import open_console
from gradwire.cli.doctor import doctor
from gradwire.cli.headroom import headroom
from gradwire.cli.lab import lab
from gradwire.cli.plan import plan
from gradwire.cli.report import report
from gradwire.cli.run import run
from gradwire.cli.usage import PlainErrors

_LOW_RANK_BYTES = (
    "The bytes of powersgd and acp depend on the model. Of fp32's bytes, powersgd sends about 1/120 for a "
    "matrix of 1000 x 1000, 1/30 for one of 256 x 256, 1/8 for embeddings and output layers (int4), and all "
    "for vectors; acp sends half of that for matrices. `gradwire plan --model` counts yours."
)

_NEXT = """\
gradwire {version} (torch {torch}): gradient averaging for PyTorch that saves bytes.

  gradwire doctor                     is this machine ready? under torchrun: are the ranks?
  gradwire headroom                   is communication the bottleneck? two ranks here, one minute
  gradwire headroom -- train.py       the same question for your own script
  gradwire run --ranks 2 --recipe int8 -- train.py    train your script with a recipe
  gradwire recipes                    what can be sent, and with which options

In Python, one line after DistributedDataParallel: gradwire.attach(model, "int8")
All commands: gradwire --help. Completion for your shell: gradwire --install-completion"""

app = typer.Typer(cls=PlainErrors, pretty_exceptions_enable=False, rich_markup_mode="rich")


def main() -> None:
    """Run the command; the console script calls this."""
    # Ranks that we start would warn at each connection on a host without a name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    app(prog_name="gradwire")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {gradwire.__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def gradwire_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    """Fast, small and correct gradient averaging for PyTorch: DDP, FSDP2 and loops of your own."""
    if context.invoked_subcommand is None:
        typer.echo(_NEXT.format(version=gradwire.__version__, torch=torch.__version__))


# Everything after the first word of SCRIPT or COMMAND belongs to it.
for command in (headroom, run, lab):
    app.command(context_settings={"allow_interspersed_args": False})(command)
app.command()(doctor)
app.command()(plan)
app.command()(report)


@app.command()
def recipes() -> None:
    """List the recipes, with their options and defaults.

    Options follow a recipe's name: int8:block=128,rounding=stochastic.
    """
    table = Table.grid(padding=(0, 2))
    for name, factory in gradwire.RECIPES.items():
        table.add_row(name, (inspect.getdoc(factory) or "").partition("\n")[0].replace("``", "`"))
        options = ", ".join(map(_option, inspect.signature(factory).parameters.values()))
        if options:
            table.add_row("", Text(options, style="dim"))
    console = open_console()
    console.print(table)
    console.print(f"\n{_LOW_RANK_BYTES}", markup=False)


def _option(parameter: inspect.Parameter) -> str:
    """Return an option with its default, as users write it after a recipe's name."""
    default = parameter.default
    if default in (None, parameter.empty):
        return parameter.name
    return f"{parameter.name}={str(default).lower() if isinstance(default, bool) else default}"
