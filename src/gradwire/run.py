"""The program ``python -m gradwire.run``, for ``torchrun -m gradwire.run --recipe bf16 train.py``."""

import typer

from gradwire.cli import run_command

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(context_settings={"allow_interspersed_args": False})(run_command)
    app(prog_name="python -m gradwire.run")
