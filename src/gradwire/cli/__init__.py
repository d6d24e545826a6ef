"""The ``gradwire`` command: one file for each of its commands."""

from gradwire.cli.app import app, main
from gradwire.cli.run import run as run_command

__all__ = ["app", "main", "run_command"]
